#!/usr/bin/env bash
# Everything that needs a GPU, in one call of ten minutes at most: the tests marked `cuda`, what engine=auto takes, speed
# beside the plain way, and the curves. Writes the table that docs/performance.md lacks, OUT/gpu.md.
#     bash scripts/gpu.sh [python [OUT]]
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-python} out=${2:-outputs} failed=0
mkdir -p "$out"
within() { # seconds, command
    timeout "$@" || { failed=1; echo "failed, or longer than $1 seconds: ${*:2}" >&2; }
}
bench() { # seconds, name, options
    within "$1" "$python" -m benchmarks speed --device cuda --out "$out/bench_cuda_$2.json" "${@:3}"
}
within 180 "$python" -m pytest -q -m cuda tests
within 60 "$python" -m fedpfl.train device=cuda method=fedobp rounds=3 restart=true "hydra.run.dir=$out/gpu_auto"
bench 120 32x32 --side 32 --repeats 2
bench 60 28x28 --side 28 --repeats 1
bench 60 jobs --side 32 --curve jobs --repeats 1
bench 60 width --side 32 --curve width --repeats 1 --rounds 1
bench 60 resnet18 --model resnet18 --side 32 --rounds 1 --repeats 1 --variants "loop bf16" "batched bf16" "batched+graphs bf16"
"$python" -m benchmarks speed --collect "$out"/bench_cuda_*.json >"$out/gpu.md" || failed=1
cat "$out/gpu.md"
exit $failed
