"""The table of methods in docs/methods.md, measured where it can be: `python
scripts/methods_table.py [--write]`.

What travels and what a client keeps is counted by the engine: two rounds of cnn4 on [1, 28, 28]
images of 10 classes, each method with the values of its configuration file; counts are the second
round's mean per client. What no code knows, the personal part and the extra local work, is a line
in the head of that file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir

from fedpfl import engine, models
from fedpfl.config.plan import check_config, register_resolver
from fedpfl.data import Federation
from fedpfl.ground import tree
from fedpfl.methods import METHODS, Method
from fedpfl.train import CONF

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
BEGIN, END = "<!-- made by scripts/methods_table.py -->", "<!-- to here -->"


def configured(name: str, *overrides: str) -> Method:
    """A method with the values of its configuration file."""
    register_resolver()
    with initialize_config_dir(CONF, version_base="1.3"):
        return check_config(compose("train", [f"method={name}", *overrides])).method


def counted(name: str) -> tuple[str, ...]:
    """Values down and up per client in round 2, values that a client keeps, and what the server
    sees.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (96, 1, 28, 28), dtype=torch.uint8, generator=generator)
    split = tuple(torch.arange(96).view(4, 24))
    y = torch.randint(0, 10, (96,), generator=generator)
    federation = Federation(
        "random",
        x,
        y,
        10,
        (0.5,),
        (0.25,),
        tuple(own[:20] for own in split),
        tuple(own[20:] for own in split),
    )
    method = configured(name, "clients=4")
    adapter = partial(models.ADAPTERS["lora"], layers=("conv", "linear"), pairs=method.pairs)
    net = models.build_network(
        "cnn4",
        federation.shape,
        10,
        0,
        adapter=adapter if method.pairs else models.ADAPTERS["none"],
    )
    local = engine.Local(epochs=1, batch_size=4, lr=0.01)
    backend, device = (
        engine.make(engine.Engine("loop"), net, torch.device("cpu")),
        torch.device("cpu"),
    )
    state = engine.make_initial_state(method, net, 4, device)
    for cohort in ([0, 1], [0, 1]):
        state, outcome = engine.play_round(
            engine.RoundSetup(backend, method, federation, local, 0), state, cohort
        )
    kept = tree.size(state.rows.initial["client"])
    counts = round(outcome.traffic.values_down / 2), round(outcome.traffic.values_up / 2), kept
    return *(f"{count:,}" for count in counts), method.server_sees


def table(methods: Mapping[str, type[Method]] = METHODS) -> str:
    """Markdown, one row per method."""
    titles = (
        "`method=`",
        "source",
        "personal part",
        "extra local work",
        "down",
        "up",
        "kept per client",
        "server sees",
    )
    rows = [titles, tuple("---" for _ in titles)]
    for name, kind in methods.items():
        cited = re.search(
            r"\(([A-Z][^()]*?\b(?:19|20)\d\d[^()]*)\)", re.sub(r"\s+", " ", kind.__doc__ or "")
        )
        head = Path(CONF, "method", f"{name}.yaml").read_text()
        said = re.search(r"^# Personal: (.+)\. Extra work: (.+)\.$", head, re.MULTILINE)
        source = cited.group(1).removesuffix(", Algorithm 1") if cited else ""
        rows.append((f"`{name}`", source, *(said.groups() if said else ("", "")), *counted(name)))
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


def main() -> None:
    """Print the table, or put it where it belongs."""
    made = table()
    if "--write" not in sys.argv[1:]:
        print(made)
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
