"""Export personal models: `python -m fedpfl.export DIRECTORY OUT` writes a `state_dict` for each client of a run."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from fedpfl.errors import FedpflError
from fedpfl.library import Trained, load


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 for a mistake of the user's."""
    parser = argparse.ArgumentParser(prog="python -m fedpfl.export", description=__doc__)
    parser.add_argument("directory", metavar="DIRECTORY", type=Path, help="of a run")
    parser.add_argument("out", metavar="OUT", type=Path, help="a new folder: client0.pt, client1.pt, ...")
    parser.add_argument(
        "--data-dir", metavar="DIR", default="", help="where the data are, if not where the run had them"
    )
    options = parser.parse_args(argv)
    try:
        count = export(load(options.directory, "cpu", options.data_dir), options.out)
    except FedpflError as error:
        print(f"fedpfl: {error}", file=sys.stderr)
        return 2
    print(f"wrote {count} models to {options.out}")
    return 0


def export(run: Trained, out: Path) -> int:
    """Write `client<k>.pt` for every client into a new folder, all or none; returns how many. Raises FedpflError.

    `torch.load(..., weights_only=True)` reads them.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
            models = Path(folder) / "models"
            models.mkdir()
            for client in range(len(run)):
                torch.save(run.personal(client), models / f"client{client}.pt")
            models.rename(out)  # refused where something is
    except (OSError, RuntimeError) as error:  # torch hides a full disk behind the second
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise FedpflError(f"cannot write {out}: {reason}; choose a new folder where there is room") from None
    return len(run)


if __name__ == "__main__":
    raise SystemExit(main())
