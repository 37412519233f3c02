"""fedpfl: an experiment runner for personalized federated learning; docs/library.md shows it from
Python.
"""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedpfl.ground.errors import FedpflError

if TYPE_CHECKING:
    from fedpfl.record.callbacks import Callback
    from fedpfl.runner.library import Round, Trained, load, rounds, run, sweep

__all__ = ["Callback", "FedpflError", "Round", "Trained", "load", "rounds", "run", "sweep"]
__version__ = "0.2.0"

if (
    find_spec("hydra") is None
):  # the first command in a clone, given to another Python than its environment's
    raise ModuleNotFoundError(
        f"{sys.executable} lacks packages that fedpfl needs; in a clone give `make setup`, then use"
        " .venv/bin/python",
        name=__name__,  # `python -m` then prints one line
    )


if not TYPE_CHECKING:  # for which there would be no unknown name

    def __getattr__(name: str) -> Any:
        """Import the library when it is first asked for: it loads torch, which takes seconds."""
        if name in __all__:
            from fedpfl.runner import library

            return getattr(library, name)
        raise AttributeError(f"module 'fedpfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
