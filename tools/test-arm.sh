#!/bin/sh
# Tests the kernels for Arm on emulated processors: compiled by Debian's cross compiler, run by qemu-user with Debian's Python for
# Arm and wheels for aarch64. Makes everything in build/arm (2 GB, most of it torch); needs Debian 12, and root to install the
# compiler and the emulator if they are missing.
#
#   sh tools/test-arm.sh PYTHON [pytest's arguments]
set -eu
case $1 in
  */*) python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1") ;; # CMake passes over a path that is relative to here
  *) python=$1 ;;
esac
shift
folder=$PWD/build/arm
mkdir -p "$folder/apt/lists/partial" "$folder/apt/archives/partial" "$folder/debs"

if ! command -v qemu-aarch64 >/dev/null || ! command -v aarch64-linux-gnu-g++ >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++-aarch64-linux-gnu qemu-user
fi

# The system's own list of architectures stays as it is.
: >"$folder/apt/status"
arm_packages() {
  apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$folder/apt" \
    -o Dir::State::status="$folder/apt/status" -o Dir::Cache="$folder/apt" -o APT::Sandbox::User=root "$@"
}
if [ ! -x "$folder/root/usr/bin/python3.11" ]; then
  arm_packages update
  (cd "$folder/debs" && arm_packages download libc6 libgcc-s1 libstdc++6 libgomp1 python3.11-minimal libpython3.11-minimal \
    libpython3.11-stdlib libpython3.11-dev zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 \
    libcrypt1 libtinfo6 libreadline8 libncursesw6)
  for package in "$folder"/debs/*.deb; do dpkg -x "$package" "$folder/root"; done
fi

# torch 2.9 is the last one whose wheel for Arm has no CUDA in it; nothing here needs a newer one.
if [ ! -d "$folder/site/torch" ]; then
  platforms=$(for version in 17 27 28 31 34 35 36; do echo "--platform manylinux_2_${version}_aarch64"; done)
  install() {
    # shellcheck disable=SC2086  # several words
    "$python" -m pip install --quiet --upgrade --target "$folder/site" $platforms --platform manylinux2014_aarch64 \
      --python-version 311 --implementation cp --abi cp311 --abi abi3 --abi none --only-binary=:all: "$@"
  }
  install numpy safetensors tokenizers jinja2 tqdm huggingface_hub 'llguidance>=1.7,<2' msgspec hypothesis pytest \
    pytest-timeout pytest-rerunfailures typing_extensions sympy networkx fsspec filelock
  install --no-deps torch==2.9.1
fi

# CMake's own test of the compiler for OpenMP would link for this machine.
"$python" -m cmake -S . -B "$folder/native" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux \
  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CXX_FLAGS="-I$folder/root/usr/include" \
  -DCMAKE_MAKE_PROGRAM="$("$python" -c 'import os, ninja; print(os.path.join(ninja.BIN_DIR, "ninja"))')" \
  -DPython_EXECUTABLE="$python" -DPython_INCLUDE_DIR="$folder/root/usr/include/python3.11" -DOpenMP_CXX_FLAGS=-fopenmp \
  -DOpenMP_CXX_LIB_NAMES=gomp -DOpenMP_gomp_LIBRARY="$(aarch64-linux-gnu-g++ -print-file-name=libgomp.so)" >"$folder/cmake.log"
"$python" -m cmake --build "$folder/native"

# The tests run from a copy, where the extension for this machine does not lie beside the one for Arm.
rm -rf "$folder/work"
mkdir "$folder/work"
cp -r quire tests benchmarks pyproject.toml "$folder/work"
rm -f "$folder"/work/quire/kernels/cpu/_native*.so
cp "$folder"/native/_native*.so "$folder/work/quire/kernels/cpu/_native.cpython-311-aarch64-linux-gnu.so"
cd "$folder/work"

on_arm() {  # PROCESSOR INSTRUCTION-SETS ARGUMENTS...
  processor=$1 sets=$2
  shift 2
  env QUIRE_TEST_ISAS="$sets" PYTHONPATH="$folder/work:$folder/site" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 \
    qemu-aarch64 -L "$folder/root" -cpu "$processor" "$folder/root/usr/bin/python3.11" -m pytest -q -p no:cacheprovider "$@"
}

# Its own libgomp has another name in torch's last wheel without CUDA: two are loaded.
other_runtime="--deselect tests/kernels/cpu/test_dispatch.py::test_one_openmp_runtime_is_loaded"
if [ $# -eq 0 ]; then set -- -m "not slow" tests/kernels/cpu; fi
# Processors without extensions, with dot products, and with everything; the last one tries what the others have, too.
# shellcheck disable=SC2086
{
  on_arm cortex-a53 portable,neon $other_runtime tests/kernels/cpu/test_dispatch.py
  on_arm neoverse-n1 portable,neon,neondot $other_runtime tests/kernels/cpu/test_dispatch.py
  on_arm max portable,neon,neondot,neoni8mm,neonbf16 $other_runtime "$@"
}
"$python" "$folder/../../tools/inner_loops.py" "$folder/native"
