"""How clients train: the settings of local training."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch

from fedpfl.ground.casting import Checked
from fedpfl.ground.ranges import (
    AtLeast,
    Count,
    NonNegative,
    Positive,
    PositiveProportion,
    ProportionBelowOne,
)
from fedpfl.methods import Phase

Beta = ProportionBelowOne


@dataclass(frozen=True)
class Local(Checked):
    """Hold the settings of an optimizer of torch.optim, without dampening.

    Its state is new in each stream of a turn.

    Attributes:
        epochs: Passes over a client's samples; None if `steps` are given.
        lr: In the first round; `for_round` gives it for later rounds.
        momentum: Of sgd, as is `nesterov`.
        clip: Norm to which a client's gradient is scaled down, before weight decay; 0: never.
        steps: Minibatches that take the place of one epoch; None if `epochs` are given.
        betas: Of adam and adamw, as is `eps`.
        decay: Factor of lr after every `decay_every` rounds, or half a cosine wave from lr down to
            0 after the last round.
    """

    epochs: Count | None
    batch_size: Annotated[int, AtLeast(2)]  # one-sample batches are skipped
    lr: Positive
    momentum: ProportionBelowOne = 0.0
    """Of sgd, as is `nesterov`."""
    weight_decay: NonNegative = 0.0
    clip: NonNegative = 0.0
    """Norm to which a client's gradient is scaled down, before weight decay; 0: never."""
    steps: Count | None = None
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    nesterov: bool = False
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Of adam and adamw, as is `eps`."""
    eps: Positive = 1e-8
    decay: PositiveProportion | Literal["cosine"] = 1.0
    """Factor of lr after every `decay_every` rounds, or half a cosine wave from lr down to 0 after
    the last round.
    """
    decay_every: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is None:
            self.check(self.steps is not None, "steps", "1 or more where local.epochs is null")
        else:
            allowed = f"null beside local.epochs={self.epochs}; set local.epochs=null"
            self.check(self.steps is None, "steps", allowed)
        fast = self.optimizer == "sgd" and self.momentum > 0
        self.check(fast or not self.nesterov, "nesterov", "false but for sgd with momentum")

    @property
    def amount(self) -> int:
        """Return the epochs of a participation, or the steps in their place."""
        return self.epochs or self.steps or 0

    def with_amount(self, amount: int) -> Local:
        """Return the values with so many epochs, or steps in their place."""
        return replace(self, epochs=amount) if self.epochs else replace(self, steps=amount)

    def for_phase(self, phase: Phase) -> Local:
        """Return the values that hold in a phase."""
        return replace(self, **dict[str, Any](phase.sgd)) if phase.sgd else self

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate depends on the round."""
        return self.decay != 1

    @property
    def is_plain(self) -> bool:
        """Whether this is SGD at one learning rate, which `Phase.step` replaces."""
        return self.optimizer == "sgd" and not self.has_schedule

    def for_round(self, number: int, rounds: int) -> Local:
        """Return the values that hold in round `number` (from 1) of `rounds`.

        As by torch.optim.lr_scheduler's CosineAnnealingLR, and StepLR or ExponentialLR
        (`decay_every=1`), stepped once a round; the rate never rounds to zero.
        """
        if not self.has_schedule:
            return self
        past = (number - 1) // self.decay_every
        if isinstance(self.decay, str):
            scale = (1 + math.cos(math.pi * past * self.decay_every / rounds)) / 2
        else:
            scale = self.decay**past
        return replace(self, lr=max(self.lr * scale, torch.finfo(torch.float32).tiny))


def unused_optimizer_text(method: str, local: Local) -> str:
    """Say that a method with its own steps uses no optimizer or schedule."""
    key = "optimizer" if local.optimizer != "sgd" else "decay"
    return (
        f"local.{key}={getattr(local, key)} has no part in {method}, which makes its own steps; "
        f"leave it at {getattr(Local, key)}"
    )
