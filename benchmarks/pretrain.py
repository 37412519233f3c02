"""Train a network on one data set as a whole, for adapters to start from.

    python -m benchmarks pretrain [--epochs 20] [--threads 2] [--out FILE] [data_dir=DIR]

By default it is a small ViT on half of CIFAR100's classes. Takes the overrides of `python -m
fedpfl.train`, as `model.layers=4 engine.precision=fp32 seed=1`. The file that it writes is for
`model.weights`. AdamW, a rate that rises for a tenth of the steps and falls to zero, smoothed
labels.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Generator, Tensor, nn

from benchmarks import harness
from fedpfl.config.run import Run
from fedpfl.ground.files import atomic_write

SETTINGS = [
    "dataset=cifar100",
    f"dataset.only={list(range(50))}",
    "model=vit",
    "augment=crop_flip",
    "clients=1",
    "partition=iid",
    "partition.test_fraction=0.1",
    "method=fedavg",
    "engine.precision=bf16",
]
BATCH_SIZE = 128
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.05
LABEL_SMOOTHING = 0.1


def main(arguments: Sequence[str]) -> None:
    """Train, print the accuracy after each epoch, and write the weights at the end."""
    parser = harness.make_parser("pretrain", __doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("outputs/vit_cifar100_50.safetensors"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args(arguments)
    torch.set_num_threads(options.threads)
    run = harness.build_run([*SETTINGS, *options.overrides])
    federation = run.federation
    module = run.net.module
    print(
        f"{federation.name}: {len(federation.train[0]):,} samples of {federation.classes} classes "
        "to train"
    )
    print(f"{sum(leaf.numel() for leaf in module.parameters()):,} parameters", flush=True)
    train(run, module, options.epochs)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(options.out) as temporary:
        values = {name: value.contiguous() for name, value in module.state_dict().items()}
        save_file(values, temporary)
    print(f"wrote {options.out}")


def train(run: Run, module: nn.Module, epochs: int) -> None:
    """Change the network's values in place; print a line after each epoch."""
    federation = run.federation
    generator = Generator().manual_seed(run.settings.seed)
    start_time = time.monotonic()
    indices = federation.train[0]
    steps_per_epoch = len(indices) // BATCH_SIZE
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, epochs * steps_per_epoch, pct_start=0.1
    )
    for epoch in range(1, epochs + 1):
        module.train()
        order = indices[torch.randperm(len(indices), generator=generator)]
        for batch in order[: steps_per_epoch * BATCH_SIZE].split(BATCH_SIZE):
            views = torch.rand(BATCH_SIZE, max(1, federation.augment_numbers), generator=generator)
            x = federation.apply_augmentation(federation.normalize(federation.x[batch]), views)
            logits = compute_logits(run, module, x)
            loss = F.cross_entropy(logits, federation.y[batch], label_smoothing=LABEL_SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
        accuracy = test_accuracy(run, module)
        seconds = time.monotonic() - start_time
        print(f"epoch {epoch} of {epochs}: accuracy {accuracy:.2f} %, {seconds:.0f} s", flush=True)


@torch.no_grad()
def test_accuracy(run: Run, module: nn.Module) -> float:
    """Return percent correct of the samples that are not trained on."""
    federation = run.federation
    module.eval()
    correct = 0
    for batch in federation.test[0].split(1000):
        logits = compute_logits(run, module, federation.normalize(federation.x[batch]))
        correct += int((logits.argmax(1) == federation.y[batch]).sum())
    return 100 * correct / len(federation.test[0])


def compute_logits(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    """Return float32 logits, in the run's precision."""
    with torch.autocast("cpu", torch.bfloat16, enabled=run.engine.precision == "bf16"):
        return module(x).float()
