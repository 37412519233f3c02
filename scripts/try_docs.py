"""Type what the docs show: `python scripts/try_docs.py [--only TEXT] [--jobs N] [--at FOLDER]`.

Runs every command of README.md, docs/*.md and the heads of conf/experiment/, training first, in a
scratch folder that looks like a fresh checkout. Training gets a few words more, which make it small
(`SMALL`), and reads made-up samples in each data set's shape; benchmarks and uploads get `BRIEF`.
Everything else is run as it stands. What cannot be run here is listed with its reason. Prints a
line per command; exits with 1 if one of them failed. Logs stay in the folder of `--at`, which takes
a few gigabytes.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from fedpfl.config import overrides, plugins
from fedpfl.config.choices import GROUPS
from fedpfl.config.plan import register_resolver
from fedpfl.config.resolvers import choice_folder
from fedpfl.train import CONF

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import hospitals  # noqa: E402 - from examples/

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
TRAIN = "python -m fedpfl.train"
PARTS = (
    "benchmarks",
    "conf",
    "docs",
    "examples",
    "fedpfl",
    "hydra_plugins",
    "scripts",
    "Makefile",
    "pyproject.toml",
    "constraints.txt",
)
PROGRAMS = (
    TRAIN,
    "torchrun ",
    "python -m fedpfl.",
    "python scripts/",
    "python -m benchmarks ",
    "make ",
    "pip ",
    "wandb ",
)

SMALL = ("rounds=2", "participation=0.5", "local.epochs=1", "eval.every=1", "checkpoint.seconds=0")
SMALL_PARTITION = {
    "samples_per_client": 40,
    "train_samples": 8,
    "test_samples": 2,
    "test_samples_per_client": 10,
}
BRIEF = {
    "python -m fedpfl.tune": (
        "rounds=2",
        "participation=0.5",
        "clients=4",
        "validation=0.2",
        "trials=2",
        "seeds=1",
    ),
    "python -m fedpfl.board suite=small": (
        *(
            "rounds=2",
            "participation=0.5",
            "clients=5",
            "unseen=0.2",
            "validation=0.2",
            "trials=1",
            "seeds=1",
        ),
        *("method=fedavg,fedper,local_only", "partition.samples_per_client=40"),
    ),
    "make bench": ("ARGS='--rounds 1 --repeats 1 --samples 20000'",),
    "wandb sync": ("--dry-run",),
    "fedpfl.report clean": ("--yes",),  # it would ask on a terminal
    "benchmarks speed": ("--rounds 1", "--repeats 1", "--samples 20000"),
    "benchmarks processes": ("--repeats 1",),
    "benchmarks overhead": ("--rounds 1", "--samples 20000"),
}
NOT_HERE = {  # part of a command: why it is not run, and the package with which it is
    "pip ": ("changes the environment; make setup does this", ""),
    "make test": ("these are the tests", ""),
    "scripts/try_docs.py": ("this is it", ""),
    "train experiment=fedselect/ablation": (
        "one of its data sets is no archive, one needs weights",
        "",
    ),
    "train experiment=fedselect/alpha": ("one of its data sets needs weights", ""),
    "report paper fedselect/figure3": (
        "made small, runs are no longer told apart by what it draws over",
        "",
    ),
    "report paper fedobp/public_logs": ("reads rounds 100 to 400 of runs at full length", ""),
    "extend=": ("goes on from a run in full length; tests/runner/test_extend.py does it", ""),
    "wandb login": ("needs an account", ""),
    "wandb_dashboard.py --project": ("needs an account", ""),
    "wandb_dashboard.py --dry-run --json": ("needs the extra dashboard", "wandb_workspaces"),
    "fedpfl.board verify": (
        "names a row of a board; tests/commands/test_board.py verifies one",
        "",
    ),
    "scripts/board.py outputs": ("reads a board at full length", ""),
    "scripts/versus.py --data": (
        "installs every peer; tests/commands/test_versus.py tries its parts",
        "",
    ),
    "torchrun ": ("needs several GPUs; tests/engine/test_ranks.py does it on a CPU", ""),
    "launcher=submitit_slurm": ("needs Slurm", ""),
    "launcher=submitit_local": ("needs the extra slurm", "hydra_plugins.hydra_submitit_launcher"),
    "tensorboard]": ("needs the extra tensorboard", "tensorboard"),
    "fedpfl.federate": ("needs the extra flower", "flwr"),
    "ray.init.address": ("needs a Ray cluster", ""),
    "launcher=ray": ("needs the extra ray", "hydra_plugins.hydra_ray_launcher"),
}
SHAPES = {  # of a sample; classes; groups
    "mnist": ((1, 28, 28), 10, 0),
    "fmnist": ((1, 28, 28), 10, 0),
    "emnist": ((1, 28, 28), 62, 0),
    "cifar10": ((3, 32, 32), 10, 0),
    "cifar100": ((3, 32, 32), 100, 0),
    "svhn": ((3, 32, 32), 10, 0),
    "organamnist": ((1, 28, 28), 11, 0),
    "organcmnist": ((1, 28, 28), 11, 0),
    "cifar10_c": ((3, 32, 32), 10, 15),
    "cinic10": ((3, 32, 32), 10, 0),
    "tiny_imagenet": ((3, 64, 64), 200, 0),
    "mini_imagenet": ((3, 84, 84), 100, 0),
    "office_home": ((3, 64, 64), 65, 4),
    "pacs": ((3, 64, 64), 7, 4),
    "digit5": ((3, 32, 32), 10, 5),
    "speech_commands": ((1, 32, 32), 35, 20),
    "ag_news": ((64,), 4, 0),
    "femnist": ((1, 28, 28), 62, 20),
    "shakespeare": ((80,), 80, 20),
    "har": ((9, 128), 6, 30),
}


class Command(NamedTuple):
    """What a page shows."""

    page: str
    text: str


class Line(NamedTuple):
    """What the shell gets for a command; and where its runs are, as commands of one place may have
    some in common.
    """

    text: str
    place: str = ""


def commands() -> list[Command]:
    """Every command in a block or in a line of a page, and in the head of an experiment; each once."""
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [
            line
            for _, block in BLOCK.findall(text)
            for line in block.replace("\\\n", " ").splitlines()
        ]
        lines += re.findall(r"`((?:python|make) [^`]+)`", BLOCK.sub("", text))
        plain = (
            re.sub(r"^fedpfl (?=[a-z])", "python -m fedpfl.", line) for line in lines
        )  # the same command
        found += [Command(page.name, " ".join(line.split("  #")[0].split())) for line in plain]
    for path in sorted((ROOT / "conf/experiment").rglob("*.yaml")):
        for line in re.findall(r"^# (?:Run|and): (.+)$", path.read_text(), re.MULTILINE):
            found += [
                Command(path.name, part.split("   ")[0].strip()) for part in line.split("   then:")
            ]
    first: dict[str, Command] = {}
    for command in found:
        if command.text.startswith(PROGRAMS):
            first.setdefault(command.text, command)
    return [*first.values()]


def words(text: str) -> list[str]:
    """What Hydra gets of a training command, without the switches."""
    return [
        word
        for word in shlex.split(text)[3:]
        if word not in ("-m", "--multirun", "--cfg", "job", "--help", "--dry-run")
    ]


def base(text: str) -> tuple[list, DictConfig]:
    """The overrides, sweeps included, and the configuration as Hydra composes it before the jobs."""
    plugins.load_plugins(
        str(ROOT / file) for file in overrides.read_list_value(words(text), "plugins")
    )
    parsed = OverridesParser.create().parse_overrides(
        overrides.adapt_for_sweeps(words(text), GROUPS)
    )
    register_resolver()
    with initialize_config_dir(CONF, version_base="1.3"):
        lines = [override.input_line for override in parsed if not override.is_sweep_override()]
        return parsed, compose("train", lines, return_hydra_config=True)


def filled(text: str) -> str:
    """With something in the place of placeholders."""
    data = "made_up" if text.startswith(TRAIN) else "large"
    return re.sub(r"\bDIR\b|/data\b|(?<=data_dir=)\.\.\.", data, text).replace("=NAME", "=demo")


def runnable(text: str) -> Line:
    """Filled, and small where the command as it stands takes long."""
    line = filled(text)
    if not line.startswith(TRAIN):
        return Line(
            " ".join(
                (line, *(word for name, more in BRIEF.items() if name in line for word in more))
            )
        )
    if "experiment=demo" in words(line):  # small as it is; the report's commands compare its runs
        return Line(line, "experiment=demo")
    cfg = base(line)[1]
    small = [*SMALL]
    if (
        "alpha" in cfg.partition or cfg.clients > 100
    ):  # others need so many clients that each class, or each group, has one
        small.append("clients=4")
    for key, most in SMALL_PARTITION.items():
        if cfg.partition.get(key):
            small.append(f"partition.{key}={min(most, cfg.partition[key])}")
    if cfg.dataset.get("once"):
        small.append("dataset.once=false")  # an archive is taken as it is
    swept = cfg.hydra.sweeper.get("params") or {}
    given = {word.partition("=")[0] for word in words(line)}
    for key in sorted({"seed", "quantile.q"} & swept.keys() - given):
        small.append(f"{key}={str(swept[key]).split(',')[0]}")  # the others differ in nothing else
    if cfg.model.get("weights"):
        small.append("model.weights=null")  # a file whose name holds its hash cannot be made up
    chosen = cfg.hydra.runtime.choices
    return Line(
        " ".join((line, *small)), f"{choice_folder(chosen.experiment or '')} {chosen.debug}"
    )


def make_up(folder: Path, names: Iterable[str], least: int = 600) -> None:
    """An .npz of data sets that have to be got from somewhere: a faint image per class under noise."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in names:
        shape, classes, groups = SHAPES[name]
        count = max(least, 10 * classes)
        arrays = {"y": np.arange(count) % classes, "test_from": np.array(count * 4 // 5)}
        signal = random.normal(size=(classes, *shape))[arrays["y"]] + random.normal(
            size=(count, *shape)
        )
        if name == "har":
            arrays["x"] = signal.astype(np.float32)
        elif name == "ag_news":
            arrays["x"] = (100 + 30 * signal).clip(0, 19_999).astype(np.int32)
        elif name == "shakespeare":
            arrays["x"] = (40 + 10 * signal).clip(0, 79).astype(np.int32)
        else:
            arrays["x"] = (127 + 30 * signal).clip(0, 255).astype(np.uint8)
        if groups:
            arrays["groups"] = random.integers(groups, size=count)
        np.savez(folder / f"{name}.npz", **arrays)


def checkout(folder: Path, names: Iterable[str] = SHAPES) -> None:
    """What a newcomer has after `make setup`, and made-up data sets."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PARTS:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != "ready":
            (folder / ".venv" / path.name).symlink_to(path)
    (folder / ".venv/ready").touch()
    make_up(folder / "made_up", names)
    shutil.copy(folder / "made_up/mnist.npz", folder / "mine.npz")
    hospitals.write_hospitals(folder / "hospitals")
    curve = "method,round,accuracy_before,accuracy_after\nfedavg,1,50,60\nfedavg,2,51,61\n"
    (folder / "published_curves.csv").write_text(curve)


def excuse(text: str) -> str:
    """Why it is not run; empty if it is."""
    for part, (reason, package) in NOT_HERE.items():
        if part in text and not (package and find_spec(package)):
            return reason
    return ""


def run(command: Command, line: Line, folder: Path) -> bool:
    """Run one in the folder, as this line, and print what became of it; its output is in `logs/`.
    Whether it failed.
    """
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {
        "PYTHONPATH": str(ROOT),
        "FEDPFL_DATA": str(folder / "made_up"),
        "OMP_NUM_THREADS": "1",
    }
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", line.text],
        cwd=folder,
        env={**os.environ, **environment, "PATH": path, "WANDB_MODE": "offline"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seconds = time.monotonic() - began
    for state in (folder / "outputs").rglob("state.pt"):
        if '"status": "finished"' in (state.parent / "summary.json").read_text():
            state.unlink()  # of 1,500 runs these would be tens of gigabytes
    log = folder / "logs" / (re.sub(r"\W+", "-", f"{command.page} {command.text}")[:150] + ".log")
    log.parent.mkdir(exist_ok=True)
    log.write_text(f"$ {line.text}\n{done.stdout}")
    last = f"\n{done.stdout.rstrip()[-500:]}" if done.returncode else ""
    print(
        f"{'FAILED' if last else 'ok':6} {seconds:5.0f} s  {command.page}: {command.text}{last}",
        flush=True,
    )
    return done.returncode != 0


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="commands with this text, or of the page of this name"
    )
    parser.add_argument("--jobs", type=int, default=2, help="training commands at a time")
    parser.add_argument("--at", type=Path, help="a folder that does not exist yet; it stays")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (args.at or Path(scratch) / "checkout").absolute()
        checkout(folder)
        make_up(folder / "large", ["fmnist"], 20_000)  # for benchmarks, on 100 clients
        os.chdir(folder)  # commands name files that are there

        lines: dict[Line, Command] = {}  # what is run, and the first command that it stands for
        spared = 0
        for command in commands():
            if args.only in command.text or args.only == command.page:
                if reason := excuse(command.text):
                    print(f"not run: {command.text}: {reason}", flush=True)
                    spared += 1
                else:
                    lines.setdefault(runnable(command.text), command)
        places: dict[str, list[Line]] = {}
        for line in lines:
            places.setdefault(line.place, []).append(line)
        rest = sorted(
            places.pop("", []), key=lambda line: "report clean" in line.text
        )  # last: it removes

        def queue(own: list[Line]) -> int:
            return sum(run(lines[line], line, folder) for line in own)

        with ThreadPoolExecutor(args.jobs) as pool:
            failed = sum(pool.map(queue, places.values()))
        failed += queue(rest)
    print(f"{len(lines)} commands run, {failed} failed; {spared} not run")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
