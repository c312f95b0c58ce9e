#!/bin/bash
# gpu-session.sh [test|kernels|steps|start|peers|loops|tune|bench|all] [PYTHON]: what wants a GPU, from the source tree, results
# in gpu-results/ (or $OUT): few files, each written as it goes, so that what is ended early leaves what it has.
# Needs torch >= 2.11 (with CUDA), Triton, numpy, safetensors, tokenizers, jinja2 and tqdm, and a C compiler for Triton; for the
# tests pytest, hypothesis and, for the families' parity and the peers, transformers. Shared data (QUIRE_SHARED, or a folder
# shared or .shared here) gives the families' tokenizers and the lengths of real requests (or TRACE names them). No build and no
# package of the server. MODELS and PEER_REQUESTS say what the parts measure: two models, and 160 of 1,000 requests by peers.
set -euo pipefail
WHAT=${1:-all}
PYTHON=${2:-python3}
OUT=${OUT:-gpu-results}
MODELS=${MODELS:-"llama-1b llama-8b"}
cd "$(dirname "$0")/.."
mkdir -p "$OUT"
export PYTHONPATH=.:tests/support PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
for folder in shared .shared; do
  if [ -z "${QUIRE_SHARED:-}" ] && [ -d "$folder" ]; then export QUIRE_SHARED="$PWD/$folder"; fi
done
status=0

"$PYTHON" -c 'from quire.engine.plan.gpu import require_gpu; print(require_gpu())'

run_tests() {
  "$PYTHON" -c 'import pytest' || { echo "pytest is missing: the tests are left out" >&2; return 1; }
  # Most of the time goes into compiling kernels, which several processes share.
  local parallel=()
  if "$PYTHON" -c 'import xdist' 2> /dev/null; then parallel=(-n 8 --dist worksteal); fi
  # Without pyproject.toml's options: its plugins may be missing here. Torch's and Triton's own warnings are none of ours.
  QUIRE_TEST_DEVICE=cuda "$PYTHON" -m pytest -q -c /dev/null --rootdir=. --import-mode=importlib -p no:cacheprovider \
    "${parallel[@]}" tests/kernels/triton tests/nn tests/worker/test_graphs.py tests/worker/test_last_tokens.py \
    tests/engine/test_loops.py tests/engine/test_exactness.py \
    2>&1 | tee "$OUT/tests.txt" | tail -n 60
}

run_kernels() {
  "$PYTHON" -m quire bench kernels --device cuda --json "$OUT/kernels.json" | tee -a "$OUT/kernels.md"
}

# The figures that docs/howto/gpu.md names, with their goals: a missed one (1) is a result, not a failure of this script.
run_part() {
  local part=$1 failed=0 code
  shift
  for model in $MODELS; do
    code=0
    "$PYTHON" -m benchmarks.gpu "$part" --model "$model" --json "$OUT/figures.jsonl" "$@" 2>&1 | tee -a "$OUT/figures.md" \
      || code=${PIPESTATUS[0]}
    if [ "$code" -gt 1 ]; then failed=1; fi
  done
  return $failed
}

run_peers() {
  local lengths="${TRACE:-${QUIRE_SHARED:-}/data/traces/sharegpt_8k_lengths.csv.gz}"
  local trace=()
  if [ -f "$lengths" ]; then trace=(--trace "$lengths"); else echo "no $lengths: random lengths instead" >&2; fi
  run_part peers "${trace[@]}" --peer-requests "${PEER_REQUESTS:-160}"
}

# Graphs and the overlapped loop, each with and without the other.
run_loops() {
  local model failed=0
  model=$(mktemp -d)
  "$PYTHON" -c "import json, sys; from benchmarks.models import CONFIGS; print(json.dumps(CONFIGS['llama-1b']))" > "$model/config.json"
  for command in latency throughput; do
    for options in "" "--enforce-eager" "--overlap off" "--enforce-eager --overlap off"; do
      echo "## $command $options" >> "$OUT/loops.md"
      # shellcheck disable=SC2086 # several options
      "$PYTHON" -m quire bench "$command" "$model" --load-format dummy --device cuda --max-model-len 4096 $options \
        2>&1 | tee -a "$OUT/loops.md" || failed=1
    done
  done
  rm -r "$model"
  return $failed
}

run_bench() {
  run_kernels || status=1
  MODELS=llama-8b run_part kernels || status=1
  run_part steps || status=1
  run_part start || status=1
  run_loops || status=1
}

case $WHAT in
  test) run_tests || status=1 ;;
  kernels) run_kernels || status=1 ;;
  steps | start) run_part "$WHAT" || status=1 ;;
  peers) run_peers || status=1 ;;
  loops) run_loops || status=1 ;;
  tune) "$PYTHON" -m quire bench kernels --device cuda --tune "$OUT" || status=1 ;;
  bench) run_bench ;;
  all) run_tests || status=1; run_bench; run_peers || status=1 ;;
  *) sed -n '2,7p' "$0" >&2; exit 2 ;;
esac
exit $status
