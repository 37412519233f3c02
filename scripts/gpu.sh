#!/usr/bin/env bash
# Everything that needs a GPU, in one call: the tests marked `cuda`, then speed on images of CIFAR10's and MNIST's shape.
#     bash scripts/gpu.sh [python]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python}
"$python" -m pytest -m cuda tests
"$python" scripts/benchmark.py --device cuda --colour --rounds 3 --repeats 2 --out outputs/bench_cuda_32x32.json
"$python" scripts/benchmark.py --device cuda --rounds 3 --repeats 2 --out outputs/bench_cuda_28x28.json
