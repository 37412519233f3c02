"""Seconds that `make tables` takes over many runs.

    python -m benchmarks report [--experiment NAME] [--seeds N] [--rounds N] [--broken N]

Writes run directories with random numbers for all runs of an experiment (Table III: 104 per seed,
1,040 by default) into a temporary folder, some of them broken, and times the command that `make
tables` calls, a process of its own.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarks import harness
from fedpfl.config.run_location import register_resolver
from fedpfl.train import CONF

ROUND_COLUMNS = (
    "seconds",
    "cohort_before",
    "cohort_after",
    "train_loss",
    "values_down",
    "values_up",
    "bits_down",
    "bits_up",
)
EVALUATION_COLUMNS = (
    "eval_seconds",
    "accuracy",
    "accuracy_pooled",
    "accuracy_std",
    "accuracy_worst10",
    "loss",
    "ft_accuracy",
    "ft_accuracy_pooled",
)
FILES = ("config.yaml", "rounds.csv", "summary.json")
COMMAND = (sys.executable, "-m", "fedpfl.report", "tables")
EVALUATION_EVERY = 20


def random_rounds(rounds: int, generator: random.Random) -> str:
    """Return a rounds.csv with an evaluation each 20 rounds."""
    lines = [",".join(("round", *ROUND_COLUMNS, *EVALUATION_COLUMNS))]
    for number in range(1, rounds + 1):
        is_evaluated = number % EVALUATION_EVERY == 0 or number == rounds
        cells = [repr(generator.uniform(10, 90)) for _ in ROUND_COLUMNS]
        for _ in EVALUATION_COLUMNS:
            cells.append(repr(generator.uniform(10, 90)) if is_evaluated else "")
        lines.append(",".join((str(number), *cells)))
    return "\n".join(lines) + "\n"


def write_runs(root: Path, experiment: str, seeds: int, rounds: int) -> list[Path]:
    """Write an experiment's runs below a folder; return their directories."""
    register_resolver()
    generator = random.Random(0)
    folders = []
    words = [f"experiment={experiment}"]
    with initialize_config_dir(CONF, version_base="1.3"):
        swept = compose("train", words, return_hydra_config=True).hydra.sweeper.params
        choices = [[f"{key}={value}" for value in str(swept[key]).split(",")] for key in swept]
        for overrides in itertools.product(*choices):
            config = compose("train", [*words, *overrides, f"rounds={rounds}"])
            name = "-".join(word.partition("=")[2] for word in overrides)
            for seed in range(seeds):
                folder = root / name / f"seed{seed}"
                folder.mkdir(parents=True)
                config.seed = seed
                summary = {"status": "finished", "rounds": rounds, "cohort": 10}
                summary |= {"parameters": 1000, "seed": seed}
                (folder / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
                (folder / "rounds.csv").write_text(random_rounds(rounds, generator))
                (folder / "summary.json").write_text(json.dumps(summary))
                folders.append(folder)
    return folders


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = harness.make_parser("report", __doc__)
    parser.add_argument("--experiment", default="fedobp/table3")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--broken", type=int, default=3)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as root:
        folders = write_runs(Path(root), options.experiment, options.seeds, options.rounds)
        for index in range(options.broken):
            # Empty, as a full disk or a crash might leave a file.
            folder = folders[index * len(folders) // options.broken]
            (folder / FILES[index % len(FILES)]).write_text("")
        load = harness.machine_load()
        start_time = time.perf_counter()
        process = subprocess.run([*COMMAND, root], capture_output=True, text=True)
        seconds = time.perf_counter() - start_time
    if process.returncode:
        sys.exit(process.stderr)
    print(
        f"{seconds:.1f} s for {len(folders)} directories of {options.rounds} rounds; "
        f"{process.stderr.count('skipped ')} are broken and skipped"
    )
    print(f"load before: {load:.2f}")
