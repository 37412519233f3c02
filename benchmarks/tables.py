"""All tables of speed on a CPU, in minutes: `make bench`.

    python -m benchmarks tables

Small networks, many clients, sub-models, and methods that hold still what does not move, each
beside what it is compared with; more of each by its own name.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from benchmarks import harness

TABLES = {
    "Small networks beside plain loops and bare kernels": ("small", []),
    "Many clients": ("sites", ["--sites", "100", "10000", "--rounds", "5"]),
    "Sub-models beside zeros around them": ("submodels", ["--model", "lenet5", "--rounds", "3"]),
    "Frozen features: methods beside FedAvg": (
        "overhead",
        ["--methods", "fedavg,fedper,fedrep,flute", "--samples", "20000", "--rounds", "2"],
    ),
}


def main(arguments: Sequence[str]) -> None:
    """Print every table under its title."""
    harness.make_parser("tables", __doc__).parse_args(arguments)
    for title, (name, options) in TABLES.items():
        print(f"\n## {title}: `python -m benchmarks {' '.join([name, *options])}`\n", flush=True)
        importlib.import_module(f"benchmarks.{name}").main(options)
