"""The schema: which keys and groups of keys there are, and what their values may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from fedpfl.data import Augment, Shift
from fedpfl.engine import Engine, FineTuning, Local, Stopping, Store
from fedpfl.engine.keys import Draws
from fedpfl.ground.casting import Checked
from fedpfl.ground.ranges import (
    Between,
    Count,
    NonNegative,
    Positive,
    PositiveProportion,
    ProportionBelowOne,
    WholeNumber,
)

Seed = Annotated[int, Between(0, 2**32 - 1)]


@dataclass(frozen=True)
class Eval(Checked):
    """Say when all clients are judged; see conf/train.yaml."""

    every: Count
    finetune_epochs: WholeNumber | tuple[Count, ...]
    finetune_every: int
    finetune_part: Literal["all", "head"] | tuple[Literal["all", "head"], ...]
    classes: Literal["all", "own"] = "all"
    common: bool = False
    horizon: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # Fine-tuned models are judged in the rounds that judge all models, so that both stand in
        # one row.
        multiple = self.finetune_every >= 1 and self.finetune_every % self.every == 0
        allowed = f"a positive multiple of eval.every ({self.every})"
        self.check(multiple or not self.finetune_epochs, "finetune_every", allowed)
        counts = [
            len(value) if isinstance(value, tuple) else 0
            for value in (self.finetune_part, self.finetune_epochs)
        ]
        self.check(
            counts[0] == counts[1],
            "finetune_epochs",
            f"a number for each part of eval.finetune_part, {self.finetune_part}",
        )

    def should_finetune(self, round_number: int, rounds: int) -> bool:
        """Return True if models are fine-tuned after a round; they are after the last."""
        is_due = round_number % self.finetune_every == 0 or round_number == rounds
        return bool(self.finetune_epochs) and is_due

    def plan_tuning(self, local: Local, draws: Draws) -> FineTuning:
        """Plan fine-tuning, given the clients' local training."""
        parts, epochs = self.finetune_part, self.finetune_epochs
        if isinstance(epochs, int):
            return FineTuning(replace(local, epochs=epochs, steps=None), draws, str(parts))
        total = replace(local, epochs=sum(epochs), steps=None)
        return FineTuning(total, draws, stages=tuple(zip(parts, epochs, strict=True)))


@dataclass(frozen=True)
class Checkpoint(Checked):
    """Set how often the state is saved and if it is kept; see conf/train.yaml."""

    seconds: NonNegative
    keep: bool = True

    def is_due(self, since: float, cost: float) -> bool:
        """Return True if it is time to save.

        At most a twentieth of a run's time goes into checkpoints, unless one after every round is
        asked for.
        """
        return since >= max(self.seconds, 20 * cost if self.seconds else 0)


@dataclass(frozen=True)
class Settings(Checked):
    """Hold the top level of the configuration."""

    seed: Seed
    rounds: Count
    clients: Count
    participation: PositiveProportion
    validation: ProportionBelowOne
    unseen: ProportionBelowOne
    unseen_groups: tuple[str, ...]
    task: Literal["classification", "multilabel", "regression", "survival", "next_token"]
    metrics: tuple[str, ...]
    data_dir: str
    device: str
    restart: bool
    extend: str
    name: str
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = self.newcomers > 0 or not self.unseen
        self.check(rule, "unseen", f"0, or a share that is a client or more of {self.clients}")
        is_one_choice = not (self.unseen and self.unseen_groups)
        self.check(is_one_choice, "unseen_groups", "[] where unseen is a share of the clients")

    @property
    def newcomers(self) -> int:
        """Return the number of clients that never take part."""
        # 0.29 * 100 is 28.999999999999996: without rounding, a client would be missing.
        return int(round(self.unseen * self.clients, 9))


@dataclass(frozen=True)
class PartitionOptions:
    """Hold the options of all partitions; see docs/data.md.

    Attributes:
        seed: In place of the run's.
        together: The column; rows with equal values stay with one client, and in one of its splits.
    """

    seed: Seed | None = None
    together: str | None = None


@dataclass(frozen=True)
class ModelOptions:
    """Hold the options that all networks share; see docs/run.md."""

    weights: Path | None = None
    head: str | None = None
    overlap: bool = False


@dataclass(frozen=True)
class AdapterOptions:
    """Hold the option of low-rank pairs that their layers have no part in."""

    assign: Literal["cycle", "random", "device"] | dict[str | int, Count] = "cycle"


SETTINGS = tuple(get_type_hints(Settings))
SCHEMAS: dict[str, Callable[..., Any]] = {
    "local": Local,
    "eval": Eval,
    "stopping": Stopping,
    "checkpoint": Checkpoint,
    "state": Store,
    "engine": Engine,
    "augment": Augment,
    "shift": Shift,
}
"""What groups of keys are for that hold the same keys whatever is chosen."""
