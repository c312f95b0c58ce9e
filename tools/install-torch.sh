#!/bin/sh
# Installs torch into the environment of $PYTHON: the CPU build where there is no NVIDIA GPU, if the package index has one.
# With an index that has CUDA builds only, that one is taken; it runs on a CPU too, but is gigabytes larger.
set -eu
PYTHON=${PYTHON:-python3}
VERSION=2.13.0
if "$PYTHON" -c 'import torch' 2>/dev/null; then
  exit 0
fi
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
  exec "$PYTHON" -m pip install --quiet "torch==$VERSION"
fi
"$PYTHON" -m pip install --quiet "torch==$VERSION+cpu" 2>/dev/null && exit 0
echo "The package index offers no CPU build of torch $VERSION; installing the default build." >&2
exec "$PYTHON" -m pip install --quiet "torch==$VERSION"
