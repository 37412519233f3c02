"""Measure fedpfl beside its peers: one workload, each in its own environment, taking turns.

    python scripts/versus.py --data DIR [--flbench DIR] [--pfllib DIR] [--htfllib DIR]
    python scripts/versus.py --data DIR --tiny --peers fedpfl pfl          # tries rows in small
    python scripts/versus.py --write                                       # docs/versus.md from docs/results/versus.csv

FashionMNIST split by Dir(0.1) over 100 clients, 10 a round, 5 epochs of SGD in batches of 32, and
the network of two convolutions that all know, built in each peer's own way. DIR of --data has the
images in torchvision's layout. FL-bench, PFLlib and HtFLlib are run in copies of the directories
that you give. A user's programs for the libraries are
scripts/peers/with_*.py. A peer that cannot be installed or fails is a row that says why.
Environments and copies stay in outputs/versus/.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedpfl import __version__, engine
from fedpfl.config import overrides
from fedpfl.data import datasets, partition
from fedpfl.ground.errors import FedpflError
from fedpfl.record import environment
from peers.measure import (
    Failed,
    Lines,
    Measurement,
    Program,
    count_code_lines,
    find_groups,
    find_interpreter,
    find_last_number,
    find_times,
    install_packages,
    mean,
    measure_program,
)
from reproduction import markdown

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versus.md"
RESULTS = ROOT / "docs" / "results" / "versus.csv"
PEERS = ROOT / "scripts" / "peers"
WORK = ROOT / "outputs" / "versus"
# Columns of the page, with their digits after the point.
PAGE_COLUMNS = {"seconds": 2, "peak_mib": 0, "first": 1, "accuracy": 2}
BEGIN, END = "<!-- made by scripts/versus.py -->", "<!-- to here -->"
MEAN, STD = 0.286, 0.3205
ROUND_END = "^-{20,}(?: time cost -+)?"
"""What PFLlib and HtFLlib print behind a round, before its seconds."""
HIDDEN = ((512,), (1024, 512))
"""Of the second and third kind of network, beside the one of two convolutions."""
FEATURES = 512
NETWORK_WITH_LAYERS = """

class Perceptron(nn.Module):
    def __init__(self, num_classes, *hidden):
        super().__init__()
        widths = (784, *hidden)
        layers = [nn.Flatten()]
        for width, next_width in zip(widths, hidden):
            layers += [nn.Linear(width, next_width), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(widths[-1], num_classes)

    def forward(self, x):
        return self.fc(self.layers(x))
"""
"""What a user adds to HtFLlib's networks."""
COLUMNS = (
    *("date", "machine", "cores", "load", "device", "python", "torch", "rounds", "peer", "version"),
    *("method", "repeat", "seconds", "peak_mib", "first", "accuracy", "lines", "error"),
)


@dataclass(frozen=True)
class Task:
    """Describe the workload of all peers.

    Attributes:
        data: folder with the images.
        folder: where the workload is written.
        rounds: of a program.
        epochs: of local training.
        device: cpu or cuda.
        directories: where the user has put peers, by name.
        clients: of the split.
        share: of the clients that a round draws.
        batch: samples of a minibatch.
        lr: of SGD.
        limit: training samples of a client at most, 0: all.
    """

    data: Path
    folder: Path
    rounds: int
    epochs: int
    device: str
    directories: dict[str, Path | None]
    clients: int = 100
    share: float = 0.1
    batch: int = 32
    lr: float = 0.05
    limit: int = 0

    def prepare(self) -> None:
        """Write the split, the images and the order that the programs read."""
        images = datasets.load_samples(
            "fmnist", self.data, mean=(MEAN,), std=(STD,), download=False
        )
        parts = partition.published(images.y.numpy(), self.clients, 42, alpha=0.1)
        cut = slice(self.limit or None)
        split = [
            {"train": train[cut].tolist(), "test": test[cut].tolist()}
            for train, test in zip(parts.train, parts.test, strict=True)
        ]
        # It may be of another workload, which fedpfl would not overwrite.
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        (self.folder / "split.json").write_text(json.dumps(split))
        np.savez(self.folder / "images.npz", x=images.x.numpy(), y=images.y.numpy())
        names = ("rounds", "epochs", "batch", "lr", "share", "device")
        order: dict[str, Any] = {name: getattr(self, name) for name in names}
        order["cohorts"] = list(engine.draw_cohorts(42, self.clients, self.share, self.rounds))
        (self.folder / "order.json").write_text(json.dumps(order))

    def split(self) -> list[dict[str, list[int]]]:
        """Return each client's places in the data set."""
        return json.loads((self.folder / "split.json").read_text())

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all images `[samples, 1, 28, 28]`, normalised, and labels."""
        with np.load(self.folder / "images.npz") as arrays:
            return (arrays["x"].astype(np.float32) / 255 - MEAN) / STD, arrays["y"]


@dataclass(frozen=True)
class Peer:
    """Hold a row's program, what it needs, and the methods that it has.

    Attributes:
        name: of the row.
        program: makes the program for a task and a method.
        methods: which it has.
        directory_name: the option that names the directory that it is run from, "" for none.
        interpreter: the Python that it needs, "" for the one that runs this.
    """

    name: str
    program: Callable[[Task, str], Program]
    methods: tuple[str, ...] = ("FedAvg", "FedPer")
    directory_name: str = ""
    interpreter: str = ""

    @property
    def packages(self) -> str:
        """Return the pinned packages of its environment, one a line; "" for fedpfl."""
        pinned = PEERS / f"{self.name.split()[0]}.txt"
        return pinned.read_text() if pinned.is_file() else ""

    @property
    def python(self) -> Path:
        """Return the interpreter of its environment."""
        if not self.packages:
            return Path(sys.executable)
        return WORK / "envs" / self.name.split()[0] / "bin" / "python"

    def version(self, task: Task) -> str:
        """Return what is compared: the pinned version, or a directory's commit or digest."""
        if not self.packages and not self.directory_name:
            return __version__
        if not self.directory_name:
            return self.packages.split()[0].rpartition("==")[2]
        home = find_directory(task, self.directory_name)
        result = subprocess.run(
            ["git", "-C", home, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        if result.returncode == 0 and (home / ".git").exists():
            return f"commit {result.stdout.strip()}"
        sources = b"".join(path.read_bytes() for path in sorted(home.rglob("*.py")))
        return f"sources {hashlib.sha256(sources).hexdigest()[:8]}"


def find_directory(task: Task, name: str) -> Path:
    """Return where a user has put a peer. Raises Failed where it is not."""
    directory = task.directories[name]
    if directory is None or not directory.is_dir():
        raise Failed(f"its directory is not given (--{name} DIR)")
    return directory.resolve()


# ---- the peers: how each is told the workload, and how its words are read


def fedpfl_program(
    task: Task, method: str, precision: str = "fp32", has_kinds: bool = False
) -> Program:
    """Return fedpfl's command; what it measures stands in its rounds.csv.

    has_kinds: with networks of three kinds.
    """
    run_directory = task.folder / f"fedpfl-{method}-{precision}{'-kinds' * has_kinds}"
    name = method.lower().replace("-", "_")
    arguments = [f"method={name}", "dataset=fmnist", "partition=file"]
    paths = {
        "data_dir": task.data,
        "partition.path": task.folder / "split.json",
        "hydra.run.dir": run_directory,
    }
    for key, path in paths.items():
        arguments += overrides.format_words(key, str(path))
    arguments += [f"rounds={task.rounds}", f"eval.every={task.rounds}"]
    arguments += [f"local.epochs={task.epochs}", f"local.lr={task.lr}", f"device={task.device}"]
    arguments += ["restart=true", f"engine.precision={precision}"]
    if has_kinds:
        layers = ", ".join(f"{{name: mlp, hidden: {[*hidden]}}}" for hidden in HIDDEN)
        arguments += ["model=mixed", f"model.kinds=[cnn4, {layers}]", f"model.features={FEATURES}"]
        arguments.append("model.common=cnn4")

    def read_output(lines: Lines) -> Measurement:
        with (run_directory / "rounds.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        return Measurement(
            seconds=mean(row["seconds"] for row in rows[1:]),
            accuracy=float(rows[-1]["accuracy_pooled"]),
            first=find_times("^directory ", lines)[0] + float(rows[0]["seconds"]),
        )

    return Program([sys.executable, "-m", "fedpfl.train", *arguments], ROOT, read_output)


def flbench_program(task: Task, method: str) -> Program:
    """Return FL-bench's command on our split.

    A round ends where the next begins; the last, after which it evaluates all, is left out.
    """
    # ---- Step 1: its data, split as ours.
    home = copy_directory(task, "flbench")
    data = home / "data" / "fmnist"
    raw_folder = Path("FashionMNIST", "raw")
    shutil.copytree(task.data / raw_folder, data / raw_folder, dirs_exist_ok=True)
    client_indices = [
        {
            "train": np.array(parts["train"]),
            "test": np.array(parts["test"]),
            "val": np.array([], dtype=np.int64),
        }
        for parts in task.split()
    ]
    clients = list(range(task.clients))
    separation = {"train": clients, "val": clients, "test": clients, "total": task.clients}
    partition_content = {"separation": separation, "data_indices": client_indices}
    (data / "partition.pkl").write_bytes(pickle.dumps(partition_content))
    (data / "args.json").write_text(json.dumps({"split": "sample"}))

    # ---- Step 2: its command.
    arguments = [f"method={method.lower()}", "dataset.name=fmnist", "model.name=avgcnn"]
    arguments += [f"optimizer.lr={task.lr}", f"common.global_epoch={task.rounds}"]
    arguments += [f"common.local_epoch={task.epochs}", f"common.batch_size={task.batch}"]
    arguments += [f"common.join_ratio={task.share}", f"common.test.client.interval={task.rounds}"]
    arguments += [f"common.use_cuda={task.device == 'cuda'}", "common.verbose_gap=1"]

    def read_output(lines: Lines) -> Measurement:
        start_times = find_times("TRAINING EPOCH:", lines)[1:]
        return Measurement(
            seconds=mean(end - start for start, end in itertools.pairwise(start_times)),
            accuracy=find_last_number(r'"accuracy": .*?([\d.]+)% ->', lines),
            first=start_times[0],
        )

    return Program(make_command("FL-bench", "main.py", arguments), home, read_output)


def pfllib_program(task: Task, method: str, name: str = "PFLlib", network: str = "CNN") -> Program:
    """Return the command of PFLlib, or of HtFLlib, on our split.

    Rounds in which it evaluates all clients are left out.
    """
    # ---- Step 1: its data, split as ours.
    home = copy_directory(task, name.lower())
    x, y = task.arrays()
    for part in ("train", "test"):
        folder = home / "dataset" / "FashionMNIST" / part
        folder.mkdir(parents=True, exist_ok=True)
        for client, parts in enumerate(task.split()):
            samples: Any = {"x": x[parts[part]], "y": y[parts[part]]}
            np.savez(folder / f"{client}.npz", data=samples)

    # ---- Step 2: its command.
    options = {
        "-data": "FashionMNIST",
        "-m": network,
        "-algo": method,
        "-dev": task.device,
        "-gr": task.rounds,
        "-eg": task.rounds,
        "-nc": task.clients,
        "-jr": task.share,
        "-ls": task.epochs,
        "-lbs": task.batch,
        "-lr": task.lr,
    }
    arguments = [str(text) for option in options.items() for text in option]

    def read_output(lines: Lines) -> Measurement:
        return Measurement(
            seconds=mean(find_groups(f"{ROUND_END} ([\\d.]+)", lines)[1:-1]),
            accuracy=100 * find_last_number(r"Averaged Test Accuracy: ([\d.]+)", lines),
            first=find_times(f"{ROUND_END} ", lines)[0],
        )

    return Program(make_command(name, "main.py", arguments), home / "system", read_output)


def htfllib_program(task: Task, method: str, has_kinds: bool = False) -> Program:
    """Return HtFLlib's command with one network for all clients, or with three kinds.

    Its families of networks are for colour images: one of them becomes ours in the copy. Methods
    that make images with a network of others are left out there, as they need its weights.
    """
    family = "HtFE-img-2"
    program = pfllib_program(task, method, "HtFLlib", family)
    main = program.cwd / "main.py"
    network = "'FedAvgCNN(in_features=1, num_classes=args.num_classes, dim=1024)'"
    if has_kinds:
        for hidden in HIDDEN:
            network += f", 'Perceptron(args.num_classes, *{hidden})'"
        with (program.cwd / "flcore" / "trainmodel" / "models.py").open("a") as file:
            file.write(NETWORK_WITH_LAYERS)
    changes = {
        r"^from flcore\.servers\.serverktl.*\n": "",
        rf'(== "{family}":\s+args\.models = )\[[^\]]*\]': rf"\1[{network}]",
    }
    text = main.read_text()
    for pattern, replacement in changes.items():
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    if network not in text:
        raise Failed(f"its main.py has no {family}")
    main.write_text(text)
    return program


def use_library(name: str, script: str) -> Callable[[Task, str], Program]:
    """Return a function that makes the program of a user of a library.

    The program prints `round SECONDS` and `accuracy PERCENT`.
    """

    def read_output(lines: Lines) -> Measurement:
        return Measurement(
            seconds=mean(find_groups(r"^round ([\d.]+)", lines)[1:]),
            accuracy=find_last_number(r"^accuracy ([\d.]+)", lines),
            first=find_times("^round ", lines)[0],
        )

    def make_program(task: Task, method: str) -> Program:
        path = PEERS / f"{script}.py"
        lines = count_code_lines(path) + count_code_lines(PEERS / "workload.py")
        return Program(make_command(name, str(path), [method]), task.folder, read_output, lines)

    return make_program


KIND_METHODS = ("LG-FedAvg", "FedProto", "FML")

ROWS = (
    Peer("fedpfl", fedpfl_program, ("FedAvg", "FedPer", "LG-FedAvg")),
    Peer("fedpfl bf16", partial(fedpfl_program, precision="bf16"), ("FedAvg",)),
    Peer("FL-bench", flbench_program, directory_name="flbench"),
    Peer("PFLlib", pfllib_program, directory_name="pfllib"),
    Peer("HtFLlib", htfllib_program, ("LG-FedAvg",), directory_name="htfllib"),
    Peer("fedpfl kinds", partial(fedpfl_program, has_kinds=True), KIND_METHODS),
    Peer(
        "HtFLlib kinds",
        partial(htfllib_program, has_kinds=True),
        KIND_METHODS,
        directory_name="htfllib",
    ),
    Peer("BlazeFL", use_library("BlazeFL", "with_blazefl"), ("FedAvg",), interpreter="python3.13"),
    Peer("Flower", use_library("Flower", "with_flower"), ("FedAvg",)),
    Peer("pfl-research", use_library("pfl-research", "with_pfl"), ("FedAvg",)),
    Peer("fluke", use_library("fluke", "with_fluke")),
)


def copy_directory(task: Task, name: str) -> Path:
    """Return a copy of a directory that the user named, which is worked in."""
    home = WORK / name
    ignored_names = shutil.ignore_patterns(".git", "rawdata", "MNIST", "out", "stylegan")
    shutil.copytree(find_directory(task, name), home, ignore=ignored_names, dirs_exist_ok=True)
    return home


def make_command(name: str, program: str, arguments: list[str]) -> list[str]:
    """Return the command that starts a program in a peer's environment."""
    python = next(peer.python for peer in ROWS if peer.name == name)
    return [str(python), str(PEERS / "start.py"), program, *arguments]


# ---- measuring


def measure_in_turns(task: Task, names: list[str], repeats: int, limit: float, out: Path) -> None:
    """Measure each row once, then each again; write all rows after each.

    Args:
        task: the workload.
        names: of the rows.
        repeats: how often.
        limit: seconds that a process may take.
        out: file of the rows.
    """
    machine = environment.describe_environment()
    facts = {
        "date": date.today(),
        "machine": machine["gpu"] if task.device == "cuda" else machine["cpu"],
        "cores": machine["cores"],
        "device": task.device,
        "python": machine["python"],
        "torch": machine["torch"],
        "rounds": task.rounds,
    }
    rows: list[dict[str, Any]] = []
    task.prepare()
    for repeat in range(repeats):
        for peer in ROWS:
            if peer.name not in names:
                continue
            for method in peer.methods:
                row = {**facts, "repeat": repeat, "load": round(os.getloadavg()[0], 2)}
                rows.append(row | measure_peer(task, peer, method, limit))
                write_rows(rows, out)


def measure_peer(task: Task, peer: Peer, method: str, limit: float) -> dict[str, Any]:
    """Return what is measured of a peer's program, or why it cannot be."""
    row: dict[str, Any] = {"peer": peer.name, "method": method}
    try:
        row["version"] = peer.version(task)
        if peer.packages:
            interpreter = find_interpreter(peer.interpreter or sys.executable)
            install_packages(peer.python.parents[1], peer.packages, interpreter)
        program = peer.program(task, method)
        measurements = measure_program(program, make_environment(task), limit)
        row |= {"lines": program.lines, **measurements}
    except Failed as error:
        row["error"] = str(error)
        print(f"{peer.name}, {method}: {error}", flush=True)
        return row
    result_text = f"{row['seconds']:.2f} s a round, {row['accuracy']:.2f} %"
    print(f"{peer.name}, {method}: {result_text}", flush=True)
    return row


def make_environment(task: Task) -> dict[str, str]:
    """Return variables for all programs."""
    variables = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(PEERS),
        "WORKLOAD": str(task.folder),
        "WANDB_MODE": "disabled",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HYDRA_FULL_ERROR": "1",
        "TQDM_DISABLE": "1",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # HtFLlib stores whole networks
    }
    if task.device == "cpu" and shutil.which("nvidia-smi"):
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables


def write_rows(rows: list[dict[str, Any]], out: Path) -> None:
    """Write what was measured."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


# ---- the page


def make_table(results: Path) -> str:
    """Return the page's part: a line on where and when, a row for each day, peer and method.

    A row of a later day says so; machine and load are the first day's.
    """
    if not results.is_file():
        return "Nothing has been measured yet."
    with results.open(newline="") as file:
        rows = list(csv.DictReader(file))

    # ---- Where and when
    facts = rows[0]
    loads = sorted(float(row["load"]) for row in rows if row["date"] == facts["date"])
    machine = f"{facts['cores']} cores, {facts['machine']}, {facts['device']}"
    caption = (
        f"Measured on {facts['date']} ({machine}, torch {facts['torch']}, Python"
        f" {facts['python']}), {facts['rounds']} rounds, load before a process {loads[0]:.1f} to"
        f" {loads[-1]:.1f}; medians ([all](results/versus.csv)).\n\n"
    )

    # ---- A row for each day, peer and method, over its repeats
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["date"], row["peer"], row["method"]), []).append(row)
    lines = []
    for (day, peer, method), group in groups.items():
        version = group[0]["version"]
        if day != facts["date"]:
            version += f" on {day}"
        successes = [row for row in group if not row["error"]]
        if successes:
            cells = []
            for name, digits in PAGE_COLUMNS.items():
                median = statistics.median(float(row[name]) for row in successes)
                cells.append(f"{median:,.{digits}f}")
            cells.append(successes[0]["lines"])
        else:
            cells = [group[-1]["error"].replace("|", "/"), *[""] * len(PAGE_COLUMNS)]
        lines.append([peer, version, method, *cells])
    titles = "|version|method|s/round|peak MiB|first round, s|accuracy, %|lines"
    return caption + markdown(titles.split("|"), lines)


def fill_page(page: str, table: str) -> str:
    """Return the page with a table between its marks."""
    head, _, after_mark = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{after_mark.partition(END)[2]}"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder with FashionMNIST in torchvision's layout, the .gz files too",
    )
    parser.add_argument("--flbench", type=Path, metavar="DIR", help="a checkout of FL-bench")
    parser.add_argument("--pfllib", type=Path, metavar="DIR", help="a checkout of PFLlib")
    parser.add_argument("--htfllib", type=Path, metavar="DIR", help="a checkout of HtFLlib")
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=[peer.name for peer in ROWS],
        default=[peer.name for peer in ROWS],
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=3600, help="seconds that a process may take")
    parser.add_argument(
        "--device", default="cuda" if shutil.which("nvidia-smi") else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="three rounds of one epoch on few samples, to try the rows",
    )
    parser.add_argument(
        "--out", type=Path, help="default: docs/results/versus.csv; --tiny: outputs/versus/tiny.csv"
    )
    parser.add_argument(
        "--write", action="store_true", help="fill docs/versus.md from what was measured, and end"
    )
    return parser


def main() -> None:
    """Measure in turns, or write the page."""
    parser = make_parser()
    options = parser.parse_args()
    if options.write:
        table = make_table(options.out or RESULTS)
        PAGE.write_text(fill_page(PAGE.read_text(), table))
        return
    if options.data is None:
        parser.error("--data is needed")
    task = Task(
        data=options.data.resolve(),
        folder=WORK / "task",
        rounds=options.rounds,
        epochs=5,
        device=options.device,
        directories={name: getattr(options, name) for name in ("flbench", "pfllib", "htfllib")},
    )
    out = options.out or RESULTS
    repeats = options.repeats
    if options.tiny:
        task = replace(task, rounds=3, epochs=1, limit=40)
        out = options.out or WORK / "tiny.csv"
        repeats = 1
    measure_in_turns(task, options.peers, repeats, options.limit, out)
    print(f"written to {out}")


if __name__ == "__main__":
    try:
        main()
    except FedpflError as error:
        sys.exit(f"fedpfl: {error}")
