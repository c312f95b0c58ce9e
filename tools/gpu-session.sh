#!/bin/sh
# gpu-session.sh [test|bench|tune|all] [PYTHON]: everything that wants a GPU, from the source tree, results in gpu-results/.
# Needs torch >= 2.11 (with CUDA), Triton, numpy, safetensors, tokenizers, jinja2 and tqdm; for the tests pytest, hypothesis and,
# for the families' parity, transformers, and the shared data (QUIRE_SHARED, or a folder .shared here; without it those tests
# are skipped). No build and no package of the server: the CPU's native kernels are not used here.
set -eu
WHAT=${1:-all}
PYTHON=${2:-python3}
OUT=${OUT:-gpu-results}
cd "$(dirname "$0")/.."
mkdir -p "$OUT"
export PYTHONPATH=.:tests/support PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
if [ -d .shared ]; then export QUIRE_SHARED="$PWD/.shared"; fi
status=0

"$PYTHON" -c 'from quire.engine.gpu import require_gpu; print(require_gpu())'

run_tests() {
  "$PYTHON" -c 'import pytest' || { echo "pytest is missing: the tests are left out" >&2; return 1; }
  # Most of the time goes into compiling kernels, which several processes share.
  PARALLEL=""
  if "$PYTHON" -c 'import xdist' 2> /dev/null; then PARALLEL="-n 8 --dist worksteal"; fi
  # Without pyproject.toml's options: its plugins may be missing here. Torch's and Triton's own warnings are none of ours.
  QUIRE_TEST_DEVICE=cuda "$PYTHON" -m pytest -q -c /dev/null --rootdir=. --import-mode=importlib -p no:cacheprovider \
    $PARALLEL tests/kernels/triton tests/nn tests/worker/test_graphs.py tests/worker/test_last_tokens.py \
    tests/engine/test_loops.py tests/engine/test_exactness.py \
    2>&1 | tee "$OUT/tests.txt" | tail -n 40
  ! grep -Eq '^(FAILED|ERROR)|[0-9]+ (failed|error)' "$OUT/tests.txt"
}

run_bench() {
  "$PYTHON" -m quire bench kernels --device cuda --json "$OUT/kernels.json" | tee "$OUT/kernels.md"
  mkdir -p "$OUT/model"
  # The sizes of Qwen3-0.6B; weights are made up.
  cat > "$OUT/model/config.json" <<'JSON'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
 "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
 "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "hidden_act": "silu",
 "tie_word_embeddings": true, "torch_dtype": "bfloat16"}
JSON
  for command in latency throughput; do
    for options in "" "--enforce-eager" "--overlap off" "--enforce-eager --overlap off"; do
      # shellcheck disable=SC2086 # several options
      "$PYTHON" -m quire bench "$command" "$OUT/model" --load-format dummy --device cuda \
        --max-model-len 4096 $options | tee "$OUT/$command$(echo "$options" | tr -d ' ').txt"
    done
  done
}

case $WHAT in
  test) run_tests || status=1 ;;
  bench) run_bench || status=1 ;;
  tune) "$PYTHON" -m quire bench kernels --device cuda --tune "$OUT" ;;
  all) run_tests || status=1; run_bench || status=1 ;;
  *) echo "usage: gpu-session.sh [test|bench|tune|all] [PYTHON]" >&2; exit 2 ;;
esac
exit $status
