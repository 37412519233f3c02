"""Run one of the measurements: `python -m benchmarks NAME ...`.

    speed      training, beside the plain way and the bare kernels
    gpu        what a GPU does in a round: waits, kernels, equal bits
    overhead   each method's rounds beside FedAvg's
    processes  a process with many threads beside many processes
    adapters   memory and time of clients that train adapters on one frozen network
    report     `make tables` over many runs
    federation federations of processes beside the simulation
    partition  statistics and a picture of a partition
    sites      federations of many sites
    small      small networks, beside a plain loop and the bare kernels
    workers    how well 2 to 16 worker threads share a round of small networks
    submodels  sub-models at their true size, beside zeros around them
    tables     small, sites, submodels and overhead, in minutes (`make bench`)
    pretrain   train a network for adapters to start from

`python -m benchmarks NAME --help` says what each takes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from fedpfl.config.messages import format_error
from fedpfl.config.overrides import HYDRA_ERRORS
from fedpfl.ground.errors import FedpflError

NAMES = (
    "adapters",
    "federation",
    "gpu",
    "overhead",
    "partition",
    "pretrain",
    "processes",
    "report",
    "sites",
    "small",
    "speed",
    "submodels",
    "tables",
    "workers",
)


def main(arguments: Sequence[str]) -> None:
    """Run the measurement that the first argument names."""
    if not arguments or arguments[0] not in NAMES:
        print(__doc__)
        sys.exit(0 if {"-h", "--help"} & {*arguments} else 2)
    name, *options = arguments
    module = importlib.import_module(f"benchmarks.{name}")
    try:
        module.main(options)
    except (FedpflError, *HYDRA_ERRORS) as error:
        sys.exit(f"fedpfl: {format_error(error)}")


if __name__ == "__main__":
    main(sys.argv[1:])
