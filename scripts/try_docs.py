"""Type what the docs show: `python scripts/try_docs.py [--only TEXT ...] [--jobs N] [--at FOLDER]`.

Runs every command of README.md, docs/*.md, docs/results/commands.sh and the heads of conf/experiment/, training first, in a
scratch folder that looks like a fresh checkout. Training gets a few words more, which make it small
(`SMALL`), and reads made-up samples in each data set's shape; benchmarks and uploads get `BRIEF`.
Everything else is run as it stands. What cannot be run here is listed with its reason. Prints a
line per command; exits with 1 if one of them failed. Logs stay in the folder of `--at`, which takes
a few gigabytes; with the same folder again, commands that passed are not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from fedpfl.config import overrides, plugins
from fedpfl.config.choices import GROUPS
from fedpfl.config.resolvers import choice_folder
from fedpfl.config.run_location import register_resolver
from fedpfl.train import CONF

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import hospitals  # noqa: E402 - from examples/

WRITTEN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*WRITTEN, *sorted((ROOT / "docs").glob("*.md"))]
MEASURED = ROOT / "docs" / "results" / "commands.sh"
"""The commands of the measured numbers."""
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"[\d.]+")
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
PASSED = "exit status 0"
PROGRAMS = (
    TRAIN,
    "torchrun ",
    "python -m fedpfl.",
    "python examples/",
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
    "wandb sync": ("--dry-run",),
    "fedpfl.report clean": ("--yes",),  # it would ask on a terminal
    "benchmarks speed": ("--rounds 1", "--repeats 1", "--samples 20000"),
    "benchmarks processes": ("--repeats 1",),
    "benchmarks pretrain": ("--epochs 1",),
    "benchmarks overhead": ("--rounds 1", "--samples 20000"),
}
# Part of a command: why it is not run, and the package with which it is.
EXCUSES = {
    "pip ": ("changes the environment; make setup does this", ""),
    "make test": ("these are the tests", ""),
    "make setup": ("the environment is there", ""),
    "make lint": ("CI does it", ""),
    "make docs": ("installs the extra docs; tests/test_project.py builds the site", ""),
    "make release": ("commits and tags; tests/test_project.py tries its parts", ""),
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
    "report ranks outputs/fedobp": ("made small, runs are in one setting", ""),
    "report paper fedobp/public_logs": ("reads rounds 100 to 400 of runs at full length", ""),
    "extend=": ("goes on from a run in full length; tests/runner/test_extend.py does it", ""),
    "wandb login": ("needs an account", ""),
    "fedpfl.dashboard --project": ("needs an account", ""),
    "fedpfl.board verify": (
        "names a row of a board; tests/commands/test_board.py verifies one",
        "",
    ),
    "scripts/board.py outputs": ("reads a board at full length", ""),
    "scripts/versus.py --data": (
        "installs every peer, as whoever measures them does",
        "",
    ),
    "dataset=hf": ("reads a folder of the user's; tests/data/test_hf.py makes one", ""),
    "--device cuda": ("needs a GPU", ""),
    "benchmarks gpu": ("needs a GPU", ""),
    "torchrun ": ("needs several GPUs; tests/engine/test_ranks.py does it on a CPU", ""),
    "launcher=submitit_slurm": ("needs Slurm", ""),
    "launcher=submitit_local": ("needs the extra slurm", "hydra_plugins.hydra_submitit_launcher"),
    "tensorboard]": ("needs the extra tensorboard", "tensorboard"),
    "ray.init.address": ("needs a Ray cluster", ""),
    "launcher=ray": ("needs the extra ray", "hydra_plugins.hydra_ray_launcher"),
}
# Of each data set the shape of a sample, the number of classes and that of groups.
SHAPES = {
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
GROUP_NAMES = {"pacs": ["art_painting", "cartoon", "photo", "sketch"]}  # which commands choose by


class Command(NamedTuple):
    """Hold what a page shows."""

    page: str
    text: str


class ShellLine(NamedTuple):
    """Hold what the shell gets for a command.

    Attributes:
        text: the line.
        queue: lines of one queue may have runs in common, and follow one another.
    """

    text: str
    queue: str = ""


def list_commands() -> list[Command]:
    """Return the commands of pages and of the heads of experiments, each once."""
    commands: list[Command] = []
    for page in (*PAGES, MEASURED):
        text = page.read_text()
        if page == MEASURED:
            text = f"```\n{text}```"
        lines = [
            line
            for _, block in BLOCK.findall(text)
            for line in block.replace("\\\n", " ").splitlines()
        ]
        lines += re.findall(r"`((?:python|make) [^`]+)`", BLOCK.sub("", text))
        for line in lines:
            full_line = re.sub(r"^fedpfl (?=[a-z])", "python -m fedpfl.", line)
            without_comment = full_line.split("  #")[0]
            commands.append(Command(page.name, " ".join(without_comment.split())))
    for path in sorted((ROOT / "conf/experiment").rglob("*.yaml")):
        for line in re.findall(r"^# (?:Run|and): (.+)$", path.read_text(), re.MULTILINE):
            for part in line.split("   then:"):
                commands.append(Command(path.name, part.split("   ")[0].strip()))
    commands_by_text: dict[str, Command] = {}
    for command in commands:
        if command.text.startswith(PROGRAMS):
            commands_by_text.setdefault(command.text, command)
    return list(commands_by_text.values())


def split_words(text: str) -> list[str]:
    """Return the words that Hydra gets of a training command, without the switches."""
    switches = ("-m", "--multirun", "--cfg", "job", "--help", "--dry-run")
    return [word for word in shlex.split(text)[3:] if word not in switches]


def compose_command(text: str) -> tuple[list[Override], DictConfig]:
    """Return a command's overrides, and the configuration before its jobs."""
    run_words = split_words(text)
    plugin_files = overrides.read_list_value(run_words, "plugins")
    plugins.load_plugins(str(ROOT / file) for file in plugin_files)
    run_words = overrides.adapt_for_sweeps(run_words, GROUPS)
    run_overrides = OverridesParser.create().parse_overrides(run_words)
    register_resolver()
    with initialize_config_dir(CONF, version_base="1.3"):
        lines = [one.input_line for one in run_overrides if not one.is_sweep_override()]
        return run_overrides, compose("train", lines, return_hydra_config=True)


def fill_placeholders(text: str) -> str:
    """Return a command with something in the place of placeholders."""
    data = "large" if "--data " in text else "made_up"
    return re.sub(r"\bDIR\b|/data\b|(?<=data_dir=)\.\.\.", data, text).replace("=NAME", "=demo")


def shorten_sweeps(sweeps: Mapping[str, object]) -> Iterator[str]:
    """Yield words that give fewer values to what an experiment sweeps over."""
    for key, text in sorted(sweeps.items()):
        values = str(text).split(",")
        # Numbers change nothing in how a run is made; a second method or data set may.
        few_values = values[:1] if NUMBER.fullmatch(values[0]) else [*values[:2], *values[2:][-1:]]
        if few_values != values and "(" not in str(text):
            yield f"{key}={','.join(few_values)}"


def make_runnable(text: str) -> ShellLine:
    """Return the line for a command, made small where it takes long."""
    line = fill_placeholders(text)
    if not line.startswith(TRAIN):
        brief_words = [
            word for name, extra_words in BRIEF.items() if name in line for word in extra_words
        ]
        return ShellLine(" ".join([line, *brief_words]))
    run_words = split_words(line)
    if "experiment=demo" in run_words:  # small as it is; the report's commands compare its runs
        return ShellLine(line, "experiment=demo")

    # ---- Words that make it small, as far as its configuration allows.
    _, cfg = compose_command(line)
    small_words = [*SMALL]
    # Four clients have no attacker, and a cohort of two bears none.
    is_hostile = any(word.startswith(("attack=", "defence=")) for word in run_words)
    # Other partitions need so many clients that each class, or each group, has one.
    if "alpha" in cfg.partition or cfg.clients > 100:
        small_words.append("clients=20" if is_hostile else "clients=4")
    for key, limit in SMALL_PARTITION.items():
        if cfg.partition.get(key):
            most = min(20, limit) if is_hostile else limit
            small_words.append(f"partition.{key}={min(most, cfg.partition[key])}")
    if cfg.shift.get("at"):
        small_words.append("shift.at=[1]")  # before the last round
    if cfg.task != "classification":
        small_words.append("hydra.run.dir=other_task")  # tables of outputs/ are of one task
    if cfg.dataset.get("once"):
        small_words.append("dataset.once=false")  # an archive is taken as it is
    sweeps = cfg.hydra.sweeper.get("params") or {}
    user_keys = {word.partition("=")[0] for word in run_words}
    small_words += shorten_sweeps({key: sweeps[key] for key in sweeps.keys() - user_keys})
    if cfg.model.get("weights"):
        small_words.append(
            "model.weights=null"
        )  # a file whose name holds its hash cannot be made up
    choices = cfg.hydra.runtime.choices
    queue = f"{choice_folder(choices.experiment or '')} {choices.debug}"
    return ShellLine(" ".join([line, *small_words]), queue)


def write_data_sets(folder: Path, names: Iterable[str], samples: int = 600) -> None:
    """Write made-up archives of data sets: a faint image per class under noise."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in names:
        shape, classes, groups = SHAPES[name]
        count = max(samples, 10 * classes)
        arrays = {"y": np.arange(count) % classes, "test_from": np.array(count * 4 // 5)}
        patterns = random.normal(size=(classes, *shape))
        signal = patterns[arrays["y"]] + random.normal(size=(count, *shape))
        if name == "har":
            arrays["x"] = signal.astype(np.float32)
        elif name == "ag_news":
            arrays["x"] = (100 + 30 * signal).clip(0, 19_999).astype(np.int32)
        elif name == "shakespeare":
            arrays["x"] = (40 + 10 * signal).clip(0, 79).astype(np.int32)
        else:
            arrays["x"] = (127 + 30 * signal).clip(0, 255).astype(np.uint8)
        if groups:
            group_names = np.array(GROUP_NAMES.get(name, range(groups)))
            arrays["groups"] = group_names[random.integers(groups, size=count)]
        np.savez(folder / f"{name}.npz", **arrays)


def make_checkout(folder: Path, names: Iterable[str] = SHAPES) -> None:
    """Make a folder as a newcomer has it after `make setup`, with made-up data sets."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PARTS:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != "ready":
            (folder / ".venv" / path.name).symlink_to(path)
    (folder / ".venv/ready").touch()
    write_data_sets(folder / "made_up", names)
    shutil.copy(folder / "made_up/mnist.npz", folder / "mine.npz")
    shutil.copy(ROOT / "examples/own_network.py", folder / "my_network.py")
    hospitals.write_hospitals(folder / "hospitals")
    curve = "method,round,accuracy_before,accuracy_after\nfedavg,1,50,60\nfedavg,2,51,61\n"
    (folder / "published_curves.csv").write_text(curve)


def find_excuse(text: str) -> str:
    """Return why a command is not run; "" if it is."""
    for part, (reason, package) in EXCUSES.items():
        if part in text and not (package and find_spec(package)):
            return reason
    return ""


def name_log(command: Command, line: ShellLine) -> str:
    """Return the name of a command's log."""
    digest = hashlib.sha256(line.text.encode()).hexdigest()[:8]
    return re.sub(r"\W+", "-", f"{command.page} {command.text}")[:150] + f"-{digest}.log"


def has_passed(log: Path) -> bool:
    """Return whether a command's log ends as that of one that passed."""
    return log.is_file() and log.read_text().endswith(f"\n{PASSED}\n")


def run_line(command: Command, line: ShellLine, folder: Path) -> bool:
    """Run a line in the folder, report it, and return whether it failed.

    Its output is in `logs/`.
    """
    # ---- Step 1: run it, unless it passed before.
    log = folder / "logs" / name_log(command, line)
    if has_passed(log):
        return False
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {
        "PYTHONPATH": str(ROOT),
        "FEDPFL_DATA": str(folder / "made_up"),
        "OMP_NUM_THREADS": "1",
    }
    start_time = time.monotonic()
    result = subprocess.run(
        ["bash", "-c", line.text],
        cwd=folder,
        env={**os.environ, **environment, "PATH": path, "WANDB_MODE": "offline"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seconds = time.monotonic() - start_time
    for state in (folder / "outputs").rglob("state.pt"):
        if '"status": "finished"' in (state.parent / "summary.json").read_text():
            state.unlink()  # of 1,500 runs these would be tens of gigabytes

    # ---- Step 2: keep its output, and say what became of it.
    has_failed = result.returncode != 0
    ending = f"exit status {result.returncode}" if has_failed else PASSED
    log.parent.mkdir(exist_ok=True)
    log.write_text(f"$ {line.text}\n{result.stdout}\n{ending}\n")
    status = "FAILED" if has_failed else "ok"
    output_end = f"\n{result.stdout.rstrip()[-500:]}" if has_failed else ""
    print(
        f"{status:6} {seconds:5.0f} s  {command.page}: {command.text}{output_end}",
        flush=True,
    )
    return has_failed


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="commands with such a text, or of such a page"
    )
    parser.add_argument("--jobs", type=int, default=2, help="training commands at a time")
    parser.add_argument("--at", type=Path, help="a folder, new or of an earlier try; it stays")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.at or Path(scratch) / "checkout").absolute()
        if not folder.exists():
            make_checkout(folder)
            write_data_sets(folder / "large", ["fmnist"], 20_000)  # for benchmarks, on 100 clients
        os.chdir(folder)  # commands name files that are there

        # ---- Step 1: what is run, with the first command that it stands for.
        lines: dict[ShellLine, Command] = {}
        excused_count = 0
        for command in list_commands():
            if not any(part in command.text or part == command.page for part in options.only):
                continue
            reason = find_excuse(command.text)
            if reason:
                print(f"not run: {command.text}: {reason}", flush=True)
                excused_count += 1
            else:
                lines.setdefault(make_runnable(command.text), command)

        # ---- Step 2: training, a few queues at a time; then what looks at runs or removes them.
        queues: dict[str, list[ShellLine]] = {}
        for line in lines:
            queues.setdefault(line.queue, []).append(line)
        final_queue = sorted(queues.pop("", []), key=lambda line: "report clean" in line.text)

        def run_queue(queue: list[ShellLine]) -> int:
            return sum(run_line(lines[line], line, folder) for line in queue)

        with ThreadPoolExecutor(options.jobs) as pool:
            failed_count = sum(pool.map(run_queue, queues.values()))
        failed_count += run_queue(final_queue)
    print(f"{len(lines)} commands run, {failed_count} failed; {excused_count} not run")
    return 1 if failed_count else 0


if __name__ == "__main__":
    sys.exit(main())
