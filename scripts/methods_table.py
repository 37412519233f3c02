"""Make docs/results/methods.csv, and from it the table of docs/methods.md.

    python scripts/methods_table.py [--write]

The engine counts what travels and what a client keeps: two rounds of cnn4 on [1, 28, 28] images of
10 classes, each method with the values of its configuration file; counts are the second round's
mean per client. The personal part and the extra local work stand in the head of that file. Outside
oracles are those of docs/results/oracles.csv.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir

from fedpfl import engine, models
from fedpfl.config.plan import check_config
from fedpfl.config.run_location import register_resolver
from fedpfl.data import Federation
from fedpfl.ground import tree
from fedpfl.methods import METHODS, SEES, Method
from fedpfl.models.adapter import lora, lora_with_residue
from fedpfl.train import CONF

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
BEGIN, END = "<!-- made by scripts/methods_table.py -->", "<!-- to here -->"
ORACLES = PAGE.parent / "results" / "oracles.csv"
COSTS = PAGE.parent / "results" / "methods.csv"
TITLES = (
    "method",
    "source",
    "personal part",
    "extra local work",
    "down",
    "up",
    "kept per client",
    "server sees",
    "outside oracle",
)
SHOWN = ("personal part", "server sees")
"""Columns of the page's table, beside the method."""
CITATION = re.compile(r"\(([A-Z][^()]*?\b(?:19|20)\d\d[^()]*)\)")
"""A source in brackets, with its year."""
HEAD_LINE = re.compile(r"^# Personal: (.+)\. Extra work: (.+)\.$", re.MULTILINE)
"""The line in the head of a method's configuration file."""
CLIENTS = 4
SAMPLES_PER_CLIENT = 24
TRAIN_SAMPLES = 20
COHORT = [0, 1]


def load_method(name: str, *overrides: str) -> Method:
    """Return a method with the values of its configuration file."""
    register_resolver()
    with initialize_config_dir(CONF, version_base="1.3"):
        return check_config(compose("train", [f"method={name}", *overrides])).method


def random_federation() -> Federation:
    """Return random images of ten classes at four clients."""
    generator = torch.Generator().manual_seed(0)
    count = CLIENTS * SAMPLES_PER_CLIENT
    x = torch.randint(0, 256, (count, 1, 28, 28), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (count,), generator=generator)
    split = torch.arange(count).view(CLIENTS, SAMPLES_PER_CLIENT)
    train = tuple(indices[:TRAIN_SAMPLES] for indices in split)
    test = tuple(indices[TRAIN_SAMPLES:] for indices in split)
    return Federation("random", x, y, 10, (0.5,), (0.25,), train, test)


def count_traffic_and_state(name: str) -> list[str]:
    """Return values down, up and kept per client in round 2.

    Last comes what the server sees.
    """
    federation = random_federation()
    method = load_method(name, f"clients={CLIENTS}")
    adapter = models.ADAPTERS["none"]
    if method.pairs:
        adapt = lora_with_residue if method.has_residue else lora
        adapter = partial(adapt, layers=("conv", "linear"), pairs=method.pairs)
    net = models.build_network("cnn4", federation.shape, 10, 0, adapter=adapter)
    common = models.build_network("mlp", federation.shape, 10, 0)
    net = models.Net(net.module, net.traits, net.name, common, **net.facts)
    local = engine.Local(epochs=1, batch_size=4, lr=0.01)
    device = torch.device("cpu")
    backend = engine.make_backend(engine.Engine("loop"), net, device)
    state = engine.make_initial_state(method, net, CLIENTS, device)
    setup = engine.RoundSetup(backend, method, federation, local, 0)
    for _ in range(2):
        state, outcome = engine.play_round(setup, state, COHORT)
    counts = [
        round(outcome.traffic.values_down / len(COHORT)),
        round(outcome.traffic.values_up / len(COHORT)),
        tree.size(state.rows.initial["client"]),
    ]
    return [*(f"{count:,}" for count in counts), method.server_sees]


def describe_oracles(name: str) -> str:
    """Return the public code beside a method, and the largest difference on any engine."""
    with ORACLES.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == name]
    peers = sorted({row["repository"].partition("/")[2] for row in rows})
    differences = []
    for row in rows:
        results = (row["loop"], row["batched"])
        differences += [float(result) for result in results if result[:1].isdigit()]
    return f"{', '.join(peers)}: {max(differences):.0e}" if differences else ""


def count_costs(methods: Mapping[str, type[Method]] = METHODS) -> list[dict[str, str]]:
    """Return a row of costs for each method."""
    rows = []
    for name, method_type in methods.items():
        citation = CITATION.search(re.sub(r"\s+", " ", method_type.__doc__ or ""))
        source = citation.group(1).removesuffix(", Algorithm 1") if citation else ""
        head = Path(CONF, "method", f"{name}.yaml").read_text()
        head_line = HEAD_LINE.search(head)
        personal_part, extra_work = head_line.groups() if head_line else ("", "")
        counts = count_traffic_and_state(name)
        cells = (name, source, personal_part, extra_work, *counts, describe_oracles(name))
        rows.append(dict(zip(TITLES, cells, strict=True)))
    return rows


def read_costs() -> list[dict[str, str]]:
    """Return the rows of docs/results/methods.csv."""
    with COSTS.open(newline="") as file:
        return list(csv.DictReader(file))


def make_table(rows: Iterable[Mapping[str, str]]) -> str:
    """Return the page's table in Markdown, one row for methods that are alike in it."""
    names: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        cells = tuple(row[title].replace(SEES[0], "") for title in SHOWN)
        names.setdefault(cells, []).append(f"`{row['method']}`")
    lines = [("`method=`", *SHOWN), ("---",) * (1 + len(SHOWN))]
    lines += [(", ".join(alike), *cells) for cells, alike in names.items()]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def main() -> None:
    """Print the table, or write it and its CSV."""
    rows = count_costs()
    text = make_table(rows)
    if "--write" not in sys.argv[1:]:
        print(text)
        return
    with COSTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, TITLES, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    before, after_mark = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after_mark.split(END)[1]}")


if __name__ == "__main__":
    main()
