#!/usr/bin/env bash
# What needs a GPU, for the first ten minutes on a real one: what matters most comes first, and each step writes its result
# as it ends, so that whatever stops the script costs the rest alone. Writes OUT/gpu.log, OUT/bench_cuda_*.json, OUT/gpu.md.
#     bash scripts/gpu.sh [python [OUT]]
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-python} out=${2:-outputs} failed=0
mkdir -p "$out"
within() { # seconds, command: what it prints is in gpu.log at once
    echo "== ${*:2}" | tee -a "$out/gpu.log"
    timeout "$@" 2>&1 | tee -a "$out/gpu.log"
    [ "${PIPESTATUS[0]}" = 0 ] || { failed=1; echo "failed, or longer than $1 seconds: ${*:2}" | tee -a "$out/gpu.log" >&2; }
}
cuda_tests() { within "$1" "$python" -m pytest -q -m cuda "${@:2}"; }
bench() { # seconds, name, options: the table is made anew after each
    within "$1" "$python" -m benchmarks speed --device cuda --out "$out/bench_cuda_$2.json" "${@:3}"
    "$python" -m benchmarks speed --collect "$out"/bench_cuda_*.json >"$out/gpu.md" || failed=1
}
within 20 "$python" -c "import torch; print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version(), torch.cuda.get_device_properties(0))"
cuda_tests 60 -x tests/engine/test_program.py
within 60 "$python" -m fedpfl.train device=cuda method=fedobp rounds=3 restart=true "hydra.run.dir=$out/gpu_auto"
bench 120 32x32 --side 32 --repeats 1
bench 60 28x28 --side 28 --repeats 1
bench 60 resnet18 --model resnet18 --side 32 --rounds 1 --repeats 1 --variants "loop bf16" "batched bf16" "batched+graphs bf16"
bench 60 width --side 32 --curve width --repeats 1 --rounds 1
bench 60 jobs --side 32 --curve jobs --repeats 1
cuda_tests 60 tests/engine/test_store.py tests/runner tests/record
for method in fedavg fedselect fedpac knn_per pfedfda fedobp; do cuda_tests 60 tests/engine/test_engine.py -k "$method"; done
cuda_tests 180 tests/engine/test_engine.py
cat "$out/gpu.md"
exit $failed
