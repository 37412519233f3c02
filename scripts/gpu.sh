#!/usr/bin/env bash
# What needs a GPU, in ten minutes: what matters most comes first, and each step writes its result as it ends, so that
# whatever stops the script costs the rest alone. Writes OUT/gpu.log, OUT/bench_cuda_*.json, OUT/gpu.md.
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
bench() { # seconds, name, options: the table is made anew after each
    within "$1" "$python" -m benchmarks speed --device cuda --out "$out/bench_cuda_$2.json" "${@:3}"
    "$python" -m benchmarks speed --collect "$out"/bench_cuda_*.json >"$out/gpu.md" || failed=1
}
within 20 "$python" -c "import torch; print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version(), torch.cuda.get_device_properties(0))"
within 60 "$python" -m pytest -q -m cuda -x tests/engine/test_program.py
within 60 "$python" -m fedpfl.train device=cuda method=fedobp rounds=6 restart=true "hydra.run.dir=$out/gpu_auto"
within 60 "$python" -m fedpfl.train -m device=cuda method=fedobp rounds=6 seed=1,2 restart=true "hydra.sweep.dir=$out/gpu_sweep"
for precision in fp32 bf16; do
    for part in equal waits profile convolutions; do within 60 "$python" -m benchmarks gpu $part --precision $precision; done
done
bench 120 32x32 --side 32 --repeats 1
bench 60 28x28 --side 28 --repeats 1
bench 60 resnet18 --model resnet18 --side 32 --rounds 1 --repeats 1 --variants "loop bf16" "batched+graphs fp32" "batched+graphs bf16"
bench 60 width --side 32 --curve width --repeats 1 --rounds 1
bench 60 jobs --side 32 --curve jobs --repeats 1
within 240 "$python" -m pytest -q -m cuda -n "${CORES:-$(nproc)}" tests/engine tests/runner tests/record
cat "$out/gpu.md"
exit $failed
