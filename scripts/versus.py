"""fedpfl beside its peers: one workload, each peer in an environment of its own, the measured
processes taking turns.

    python scripts/versus.py --data DIR [--flbench DIR] [--pfllib DIR]     # FashionMNIST in torchvision's layout
    python scripts/versus.py --data DIR --tiny --peers fedpfl pfl          # tries rows in small
    python scripts/versus.py --write                                       # docs/versus.md from docs/results/versus.csv

FashionMNIST split by Dir(0.1) over 100 clients, 10 a round, 5 epochs of SGD in batches of 32, and
the network of two convolutions that all know, built in each peer's own way. FL-bench and PFLlib are
run in copies of the directories that you give. A user's programs for the libraries are
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
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
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
    Program,
    installed,
    last,
    matched,
    mean,
    measured,
    moments,
    written,
)
from reproduction import markdown

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS, PEERS = (
    ROOT / "docs" / "versus.md",
    ROOT / "docs" / "results" / "versus.csv",
    ROOT / "scripts" / "peers",
)
WORK = ROOT / "outputs" / "versus"
SHOWN = {
    "seconds": 2,
    "peak_mib": 0,
    "first": 1,
    "accuracy": 2,
}  # columns of the page, digits after the point
BEGIN, END = "<!-- made by scripts/versus.py -->", "<!-- to here -->"
MEAN, STD = 0.286, 0.3205
COLUMNS = (
    *("date", "machine", "cores", "load", "device", "python", "torch", "rounds", "peer", "version"),
    *("method", "repeat", "seconds", "peak_mib", "first", "accuracy", "lines", "error"),
)


@dataclass(frozen=True)
class Task:
    """The workload: what all peers are told."""

    data: Path
    folder: Path
    rounds: int
    epochs: int
    device: str
    given: dict[str, Path | None]
    clients: int = 100
    share: float = 0.1
    batch: int = 32
    lr: float = 0.05
    limit: int = 0  # training samples of a client, 0: all

    def prepare(self) -> None:
        """Write the split, the images and the order that the programs read, into an empty folder."""
        images = datasets.load_samples(
            "fmnist", self.data, mean=(MEAN,), std=(STD,), download=False
        )
        parts = partition.published(images.y.numpy(), self.clients, 42, alpha=0.1)
        cut = slice(self.limit or None)
        pairs = zip(parts.train, parts.test, strict=True)
        split = [
            {"train": own[cut].tolist(), "test": tested[cut].tolist()} for own, tested in pairs
        ]
        shutil.rmtree(
            self.folder, ignore_errors=True
        )  # of another workload, which fedpfl would not overwrite
        self.folder.mkdir(parents=True)
        (self.folder / "split.json").write_text(json.dumps(split))
        np.savez(self.folder / "images.npz", x=images.x.numpy(), y=images.y.numpy())
        cohorts = list(engine.draw_cohorts(42, self.clients, self.share, self.rounds))
        told = {
            name: getattr(self, name)
            for name in ("rounds", "epochs", "batch", "lr", "share", "device")
        }
        (self.folder / "order.json").write_text(json.dumps({**told, "cohorts": cohorts}))

    def split(self) -> list[dict[str, list[int]]]:
        """Return each client's places in the data set."""
        return json.loads((self.folder / "split.json").read_text())

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all images `[samples, 1, 28, 28]`, normalised, and labels."""
        with np.load(self.folder / "images.npz") as arrays:
            return (arrays["x"].astype(np.float32) / 255 - MEAN) / STD, arrays["y"]


@dataclass(frozen=True)
class Peer:
    """A row's program, what it needs, and the methods that it has."""

    name: str
    program: Callable[[Task, str], Program]
    methods: tuple[str, ...] = ("FedAvg", "FedPer")
    given: str = ""  # the directory that it is run from

    @property
    def packages(self) -> str:
        """Return what its environment has, a pinned package a line; nothing for fedpfl, which has
        its own.
        """
        pinned = PEERS / f"{self.name.split()[0]}.txt"
        return pinned.read_text() if pinned.is_file() else ""

    @property
    def python(self) -> Path:
        """Return the interpreter of its environment."""
        return (
            WORK / "envs" / self.name.split()[0] / "bin" / "python"
            if self.packages
            else Path(sys.executable)
        )

    def version(self, task: Task) -> str:
        """Return what is compared: the pinned version, or a directory's commit or digest."""
        if not self.given:
            return self.packages.split()[0].rpartition("==")[2] if self.packages else __version__
        place = directory(task, self.given)
        asked = subprocess.run(
            ["git", "-C", place, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        if asked.returncode == 0 and (place / ".git").exists():
            return f"commit {asked.stdout.strip()}"
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(place.rglob("*.py"))))
        return f"sources {digest.hexdigest()[:8]}"


def directory(task: Task, name: str) -> Path:
    """Return where a user has put a peer. Raises Failed where it is not."""
    place = task.given[name]
    if place is None or not place.is_dir():
        raise Failed(f"its directory is not given (--{name} DIR)")
    return place.resolve()


# ---- the peers: how each is told the workload, and how its words are read


def fedpfl(task: Task, method: str, precision: str = "fp32") -> Program:
    """One command; what it measures stands in its rounds.csv."""
    out = task.folder / f"fedpfl-{method}-{precision}"
    told = [f"method={method.lower()}", "dataset=fmnist", "partition=file"]
    paths = {
        "data_dir": task.data,
        "partition.path": task.folder / "split.json",
        "hydra.run.dir": out,
    }
    told += [word for key, path in paths.items() for word in overrides.format_words(key, str(path))]
    told += [f"rounds={task.rounds}", f"eval.every={task.rounds}"]
    told += [
        f"local.epochs={task.epochs}",
        f"local.lr={task.lr}",
        f"device={task.device}",
        "restart=true",
    ]
    told += [f"engine.precision={precision}"]

    def read(lines: Lines) -> tuple[float, float, float]:
        with (out / "rounds.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        first = moments("^directory ", lines)[0] + float(rows[0]["seconds"])
        return mean(row["seconds"] for row in rows[1:]), float(rows[-1]["accuracy_pooled"]), first

    return Program([sys.executable, "-m", "fedpfl.train", *told], ROOT, read)


def flbench(task: Task, method: str) -> Program:
    """Its command on our split; a round ends where the next begins, before the last, after which it
    judges all.
    """
    home = copied(task, "flbench")
    data = home / "data" / "fmnist"
    shutil.copytree(
        task.data / "FashionMNIST" / "raw", data / "FashionMNIST" / "raw", dirs_exist_ok=True
    )
    everyone, nobody = list(range(task.clients)), np.array([], dtype=np.int64)
    own = [
        {**{name: np.array(rows) for name, rows in one.items()}, "val": nobody}
        for one in task.split()
    ]
    parts = {"train": everyone, "val": everyone, "test": everyone, "total": task.clients}
    (data / "partition.pkl").write_bytes(pickle.dumps({"separation": parts, "data_indices": own}))
    (data / "args.json").write_text(json.dumps({"split": "sample"}))
    told = [
        f"method={method.lower()}",
        "dataset.name=fmnist",
        "model.name=avgcnn",
        f"optimizer.lr={task.lr}",
    ]
    told += [f"common.global_epoch={task.rounds}", f"common.local_epoch={task.epochs}"]
    told += [f"common.batch_size={task.batch}", f"common.join_ratio={task.share}"]
    told += [
        f"common.test.client.interval={task.rounds}",
        f"common.use_cuda={task.device == 'cuda'}",
        "common.verbose_gap=1",
    ]

    def read(lines: Lines) -> tuple[float, float, float]:
        began = moments("TRAINING EPOCH:", lines)[1:]
        seconds = mean(after - before for before, after in itertools.pairwise(began))
        return seconds, last(r'"accuracy": .*?([\d.]+)% ->', lines), began[0]

    return Program(started("FL-bench", "main.py", *told), home, read)


def pfllib(task: Task, method: str) -> Program:
    """Its command on our split; of its rounds those in which it does not judge all clients."""
    home = copied(task, "pfllib")
    x, y = task.arrays()
    for part in ("train", "test"):
        place = home / "dataset" / "FashionMNIST" / part
        place.mkdir(parents=True, exist_ok=True)
        for client, one in enumerate(task.split()):
            np.savez(place / f"{client}.npz", data={"x": x[one[part]], "y": y[one[part]]})  # type: ignore[arg-type]
    told = ["-data", "FashionMNIST", "-m", "CNN", "-algo", method, "-dev", task.device]
    told += [
        "-gr",
        str(task.rounds),
        "-eg",
        str(task.rounds),
        "-nc",
        str(task.clients),
        "-jr",
        str(task.share),
    ]
    told += ["-ls", str(task.epochs), "-lbs", str(task.batch), "-lr", str(task.lr)]

    def read(lines: Lines) -> tuple[float, float, float]:
        seconds = matched(r"-+ time cost -+ ([\d.]+)", lines)[1:-1]
        first = moments("-+ time cost -+", lines)[0]
        return mean(seconds), 100 * last(r"Averaged Test Accuracy: ([\d.]+)", lines), first

    return Program(started("PFLlib", "main.py", *told), home / "system", read)


def library(name: str, script: str) -> Callable[[Task, str], Program]:
    """Return how a user's own program is started, which prints `round SECONDS` and `accuracy
    PERCENT`.
    """

    def program(task: Task, method: str) -> Program:
        def read(lines: Lines) -> tuple[float, float, float]:
            return (
                mean(matched(r"^round ([\d.]+)", lines)[1:]),
                last(r"^accuracy ([\d.]+)", lines),
                moments("^round ", lines)[0],
            )

        path = PEERS / f"{script}.py"
        command = started(name, str(path), method)
        return Program(command, task.folder, read, written(path) + written(PEERS / "workload.py"))

    return program


ROWS = (
    Peer("fedpfl", fedpfl),
    Peer("fedpfl bf16", lambda task, method: fedpfl(task, method, "bf16"), ("FedAvg",)),
    Peer("FL-bench", flbench, given="flbench"),
    Peer("PFLlib", pfllib, given="pfllib"),
    Peer("Flower", library("Flower", "with_flower"), ("FedAvg",)),
    Peer("pfl-research", library("pfl-research", "with_pfl"), ("FedAvg",)),
    Peer("fluke", library("fluke", "with_fluke")),
)


def copied(task: Task, name: str) -> Path:
    """Return a copy of a directory that was given, which is worked in."""
    home, ignored = WORK / name, shutil.ignore_patterns(".git", "rawdata", "MNIST", "out")
    shutil.copytree(directory(task, name), home, ignore=ignored, dirs_exist_ok=True)
    return home


def started(name: str, *program: str) -> list[str]:
    """Return the command that starts a program in a peer's environment."""
    python = next(peer.python for peer in ROWS if peer.name == name)
    return [str(python), str(PEERS / "start.py"), *program]


# ---- measuring


def in_turns(task: Task, names: list[str], repeats: int, limit: float, out: Path) -> None:
    """Measure each row once, then each again; what is known is written after each."""
    chosen = [peer for peer in ROWS if peer.name in names]
    here = environment.describe_environment()
    facts = {
        "date": date.today(),
        "machine": here["gpu"] if task.device == "cuda" else here["cpu"],
        "cores": here["cores"],
        "device": task.device,
    }
    facts |= {"python": here["python"], "torch": here["torch"], "rounds": task.rounds}
    told = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(PEERS),
        "WORKLOAD": str(task.folder),
        "WANDB_MODE": "disabled",
    }
    told |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "HYDRA_FULL_ERROR": "1"}
    told |= (
        {"CUDA_VISIBLE_DEVICES": ""} if task.device == "cpu" and shutil.which("nvidia-smi") else {}
    )
    rows: list[dict[str, Any]] = []
    task.prepare()
    for repeat in range(repeats):
        for peer in chosen:
            for method in peer.methods:
                row = {
                    **facts,
                    "peer": peer.name,
                    "method": method,
                    "repeat": repeat,
                    "load": round(os.getloadavg()[0], 2),
                }
                try:
                    row["version"] = peer.version(task)
                    if peer.packages:
                        installed(peer.python.parents[1], peer.packages)
                    program = peer.program(task, method)
                    row |= {"lines": program.lines, **measured(program, told, limit)}
                    print(
                        f"{peer.name}, {method}: {row['seconds']:.2f} s a round,"
                        f" {row['accuracy']:.2f} %",
                        flush=True,
                    )
                except Failed as error:
                    row["error"] = str(error)
                    print(f"{peer.name}, {method}: {error}", flush=True)
                rows.append(row)
                write(rows, out)


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """Write what was measured."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


# ---- the page


def table(results: Path) -> str:
    """Return the page's part: a line on where and when, a row for each peer and method."""
    if not results.is_file():
        return "Nothing has been measured yet."
    with results.open(newline="") as file:
        rows = list(csv.DictReader(file))
    first, loads = rows[0], sorted(float(row["load"]) for row in rows)
    where = f"{first['cores']} cores, {first['machine']}, {first['device']}, torch {first['torch']}"
    head = (
        f"Measured on {first['date']} ({where}, Python {first['python']}), {first['rounds']}"
        " rounds, "
    )
    head += (
        f"load before a process {loads[0]:.1f} to {loads[-1]:.1f}; medians, least and greatest.\n\n"
    )
    titles = (
        "",
        "version",
        "method",
        "s/round",
        "peak MiB",
        "first round, s",
        "accuracy, %",
        "lines",
    )
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["peer"], row["method"]), []).append(row)
    lines = []
    for (peer, method), own in groups.items():
        sound = [row for row in own if not row["error"]]
        cells = (
            [spread(sound, name, digits) for name, digits in SHOWN.items()]
            if sound
            else [own[-1]["error"].replace("|", "/")]
        )
        cells += [sound[0]["lines"]] if sound else [""] * len(SHOWN)
        lines.append([peer, own[0]["version"], method, *cells])
    return head + markdown(titles, lines)


def spread(rows: list[dict[str, str]], column: str, digits: int) -> str:
    """Return the median of a column, and the least and the greatest where they differ."""
    values = sorted(float(row[column]) for row in rows)
    least, median, most = (
        f"{one:,.{digits}f}" for one in (values[0], statistics.median(values), values[-1])
    )
    return median if least == most else f"{median} ({least} to {most})"


def filled(page: str, made: str) -> str:
    """Return the page with what was made between its marks."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Measure in turns, or write the page."""
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
    given = parser.parse_args()
    if given.write:
        PAGE.write_text(filled(PAGE.read_text(), table(given.out or RESULTS)))
        return
    if given.data is None:
        parser.error("--data is needed")
    short = (
        {"rounds": 3, "epochs": 1, "limit": 40}
        if given.tiny
        else {"rounds": given.rounds, "epochs": 5}
    )
    given_peers = {"flbench": given.flbench, "pfllib": given.pfllib}
    task = Task(
        given.data.resolve(), WORK / "task", device=given.device, given=given_peers, **short
    )
    out = given.out or (WORK / "tiny.csv" if given.tiny else RESULTS)
    in_turns(task, given.peers, 1 if given.tiny else given.repeats, given.limit, out)
    print(f"written to {out}")


if __name__ == "__main__":
    try:
        main()
    except FedpflError as error:
        sys.exit(f"fedpfl: {error}")
