"""Seconds that `make tables` takes over many runs.

    python scripts/report_speed.py [--experiment NAME] [--seeds N] [--rounds N] [--broken N]

Writes run directories with random numbers for all runs of an experiment (Table III: 104 per seed,
1,040 by default) into a temporary folder, some of them broken, and times the command that `make
tables` calls, a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from fedpfl.config.plan import register_resolver
from fedpfl.train import CONF

COLUMNS = (
    *(
        "round",
        "seconds",
        "eval_seconds",
        "cohort_before",
        "cohort_after",
        "train_loss",
        "accuracy",
        "accuracy_pooled",
    ),
    *(
        "accuracy_std",
        "accuracy_worst10",
        "loss",
        "ft_accuracy",
        "ft_accuracy_pooled",
        "values_down",
        "values_up",
    ),
    *("bits_down", "bits_up"),
)
ALWAYS = {
    "seconds",
    "cohort_before",
    "cohort_after",
    "train_loss",
    "values_down",
    "values_up",
    "bits_down",
    "bits_up",
}
FILES = ("config.yaml", "rounds.csv", "summary.json")
COMMAND = (sys.executable, "-m", "fedpfl.report", "tables", "--paper")


def rows(rounds: int, chance: random.Random) -> str:
    """A rounds.csv: every column on an evaluation each 20 rounds, the cheap ones always."""
    lines = [",".join(COLUMNS)]
    for number in range(1, rounds + 1):
        judged = number % 20 == 0 or number == rounds
        cells = (
            repr(chance.uniform(10, 90)) if judged or name in ALWAYS else "" for name in COLUMNS[1:]
        )
        lines.append(",".join((str(number), *cells)))
    return "\n".join(lines) + "\n"


def write(root: Path, experiment: str, seeds: int, rounds: int) -> list[Path]:
    """An experiment's runs below `root`, `seeds` of each."""
    register_resolver()
    chance, folders = random.Random(0), []
    with initialize_config_dir(CONF, version_base="1.3"):
        swept = compose(
            "train", [f"experiment={experiment}"], return_hydra_config=True
        ).hydra.sweeper.params
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        parsed = parser.parse_overrides([f"{name}={values}" for name, values in swept.items()])
        for overrides in BasicSweeper.split_arguments(parsed, None)[0]:
            full = compose("train", [f"experiment={experiment}", *overrides, f"rounds={rounds}"])
            for seed in range(seeds):
                folder = (
                    root / "-".join(word.partition("=")[2] for word in overrides) / f"seed{seed}"
                )
                folder.mkdir(parents=True)
                full.seed = seed
                (folder / "config.yaml").write_text(OmegaConf.to_yaml(full, resolve=True))
                (folder / "rounds.csv").write_text(rows(rounds, chance))
                summary = {
                    "status": "finished",
                    "rounds": rounds,
                    "cohort": 10,
                    "parameters": 1000,
                    "seed": seed,
                }
                (folder / "summary.json").write_text(json.dumps(summary))
                folders.append(folder)
    return folders


def spoil(folder: Path, name: str) -> None:
    """Leave the file as a full disk or a crash might: empty."""
    (folder / name).write_text("")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiment", default="fedobp/table3")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--broken", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folders = write(Path(name), args.experiment, args.seeds, args.rounds)
        for place in range(args.broken):
            spoil(folders[place * len(folders) // args.broken], FILES[place % len(FILES)])
        load, started = os.getloadavg()[0], time.perf_counter()
        done = subprocess.run([*COMMAND, name], capture_output=True, text=True)
        seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(done.stderr)
    skipped = done.stderr.count("skipped ")
    print(
        f"{seconds:.1f} s for {len(folders)} directories of {args.rounds} rounds; {skipped} are broken and skipped"
    )
    print(f"load before: {load:.2f}")


if __name__ == "__main__":
    main()
