#!/usr/bin/env bash
# Everything that needs a GPU, in one call: the tests marked `cuda`, then speed beside the plain way, and the curves.
#     bash scripts/gpu.sh [python [folder]]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python} out=${2:-outputs}
"$python" -m pytest -m cuda tests
bench() { "$python" scripts/benchmark.py --device cuda --repeats 2 "$@"; }
bench --side 32 --out "$out/bench_cuda_32x32.json"
bench --side 28 --out "$out/bench_cuda_28x28.json"
bench --side 32 --curve jobs --repeats 1 --out "$out/bench_cuda_jobs.json"
bench --side 32 --curve width --repeats 1 --rounds 1 --out "$out/bench_cuda_width.json"
bench --model resnet18 --side 32 --rounds 1 --repeats 1 --variants "loop bf16" "batched bf16" --out "$out/bench_cuda_resnet18.json"
