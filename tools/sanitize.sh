#!/bin/sh
# Builds the native kernels with the address and undefined-behaviour sanitizers, beside the ordinary build and in an
# environment of its own, and runs their tests. Usage: tools/sanitize.sh PYTHON [pytest arguments]
#
# Leaks are not looked for: the interpreter frees little at exit. libasan must be loaded before anything else, and
# libstdc++ with it, or it cannot find the function that throws exceptions.
set -eu
python=$1
shift
folder=build/sanitize
[ -x "$folder/bin/python" ] || "$python" -m venv --without-pip "$folder"
own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Everything but Quire comes from the ordinary environment.
"$python" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("site-packages")))' > "$own/base.pth"
"$folder/bin/python" -m pip install --quiet --no-deps --no-build-isolation --force-reinstall . \
  --config-settings=cmake.define.QUIRE_SANITIZE=ON \
  --config-settings=cmake.build-type=RelWithDebInfo \
  --config-settings=build-dir="$folder/native"
if [ $# -eq 0 ]; then
  set -- tests/kernels/cpu tests/kernels/test_selection.py tests/weights/test_head_start.py  # what runs native code
fi
# pytest would find the package in this folder first, which has no extension beside it: the tests run from a copy.
rm -rf "$folder/work"
mkdir "$folder/work"
cp -r tests pyproject.toml "$folder/work"
interpreter=$PWD/$folder/bin/python
cd "$folder/work"
compiler=${CXX:-c++}
exec env LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libstdc++.so.6)" \
  ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
  "$interpreter" -P -m pytest -q -p no:cacheprovider "$@"
