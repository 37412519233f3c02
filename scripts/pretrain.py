"""Train a network on one data set as a whole, for adapters to start from: a small ViT on half of
CIFAR100's classes.

    python scripts/pretrain.py [--epochs 20] [--threads 2] [--out
    outputs/vit_cifar100_50.safetensors] [data_dir=DIR]

Takes the overrides of `python -m fedpfl.train`, as `model.layers=4 engine.precision=fp32 seed=1`.
The file that it writes is for `model.weights`. AdamW, a rate that rises for a tenth of the steps
and falls to zero, smoothed labels.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from safetensors.torch import save_file
from torch import Generator, Tensor, nn

from fedpfl.config.messages import format_error
from fedpfl.config.plan import Run, build_run, check_config, register_resolver
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.files import atomic_write
from fedpfl.train import CONF

SETTINGS = [
    *("dataset=cifar100", f"dataset.only={list(range(50))}", "model=vit", "augment=crop_flip"),
    *(
        "clients=1",
        "partition=iid",
        "partition.test_fraction=0.1",
        "method=fedavg",
        "engine.precision=bf16",
    ),
]
BATCH, RATE, DECAY, SMOOTHING = 128, 1e-3, 0.05, 0.1


def main(arguments: list[str]) -> None:
    """Train, telling the accuracy after each epoch, and write the weights at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("outputs/vit_cifar100_50.safetensors"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args(arguments)
    torch.set_num_threads(options.threads)
    register_resolver()
    with initialize_config_dir(CONF, version_base="1.3"):
        run = build_run(check_config(compose("train", [*SETTINGS, *options.overrides])))
    module = run.net.module
    print(
        f"{run.federation.name}: {len(run.federation.train[0]):,} samples of {run.federation.classes} classes to train"
    )
    print(f"{sum(leaf.numel() for leaf in module.parameters()):,} parameters", flush=True)
    train(run, module, options.epochs)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(options.out) as aside:
        values = {name: value.contiguous() for name, value in module.state_dict().items()}
        save_file(values, aside, run.origin.trained.to_header())
    print(f"wrote {options.out}")


def train(run: Run, module: nn.Module, epochs: int) -> None:
    """Change the network's values in place; print a line after each epoch."""
    federation, generator, begun = (
        run.federation,
        Generator().manual_seed(run.settings.seed),
        time.monotonic(),
    )
    index = federation.train[0]
    steps = epochs * (len(index) // BATCH)
    optimizer = torch.optim.AdamW(module.parameters(), RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    for epoch in range(1, epochs + 1):
        module.train()
        order = index[torch.randperm(len(index), generator=generator)]
        for part in order[: len(index) // BATCH * BATCH].split(BATCH):
            views = torch.rand(BATCH, max(1, federation.augment_numbers), generator=generator)
            x = federation.apply_augmentation(federation.normalize(federation.x[part]), views)
            loss = F.cross_entropy(
                logits(run, module, x), federation.y[part], label_smoothing=SMOOTHING
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        seconds = time.monotonic() - begun
        print(
            f"epoch {epoch} of {epochs}: accuracy {accuracy(run, module):.2f} %, {seconds:.0f} s",
            flush=True,
        )


@torch.no_grad()
def accuracy(run: Run, module: nn.Module) -> float:
    """Return percent correct of the samples that are not trained on."""
    federation = run.federation
    module.eval()
    correct = sum(
        int(
            (
                logits(run, module, federation.normalize(federation.x[part])).argmax(1)
                == federation.y[part]
            ).sum()
        )
        for part in federation.test[0].split(1000)
    )
    return 100 * correct / len(federation.test[0])


def logits(run: Run, module: nn.Module, x: Tensor) -> Tensor:
    """Return float32 logits, in the run's precision."""
    with torch.autocast("cpu", torch.bfloat16, enabled=run.engine.precision == "bf16"):
        return module(x).float()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (FedpflError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"fedpfl: {format_error(error)}")
