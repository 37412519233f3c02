"""Export a run: its personal models as files, a `state_dict` for each client, or its record to loggers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

<<<<<<< HEAD
import torch

from fedpfl.ground import files, lock
from fedpfl.ground.errors import FedpflError, reason
from fedpfl.ground.identity import identity
from fedpfl.methods import METHODS
=======
from fedpfl.ground.errors import FedpflError
>>>>>>> main
from fedpfl.record.loggers import mirrors
from fedpfl.runner.export import log, write
from fedpfl.runner.library import load, logger

USAGE = """python -m fedpfl.export [--data-dir DIR] DIRECTORY OUT
       python -m fedpfl.export DIRECTORY ... logger=NAME [logger.KEY=VALUE ...]"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 for a mistake of the user's."""
    parser = argparse.ArgumentParser(prog="python -m fedpfl.export", usage=USAGE, description=__doc__)
    parser.add_argument(
        "words",
        metavar="WORD",
        nargs="+",
        help="OUT: a new folder (client0.pt, client1.pt, ...); logger: as in training",
    )
    parser.add_argument(
        "--data-dir", metavar="DIR", default="", help="where the data are, if not where the run had them"
    )
    options = parser.parse_intermixed_args(argv)
    words = [word for word in options.words if word.startswith(("logger=", "logger."))]
    places = [Path(word) for word in options.words if word not in words]
    if len(places) != 2 if not words else not places:
        parser.error("give a DIRECTORY and OUT, or one DIRECTORY or more and logger=...")
    try:
        if not words:
            count = write(load(places[0], "cpu", options.data_dir), places[1])
            print(f"wrote {count} models to {places[1]}")
            return 0
        chosen = logger(words)
        if not mirrors(chosen):
            raise FedpflError(f"{' '.join(words)} logs nothing beside the run directory; choose others")
    except FedpflError as error:
        print(f"fedpfl: {error}", file=sys.stderr)
        return 2
    failed = False
    for path in places:
        try:
            print(f"logged {log(load(path), chosen)} rounds of {path}")
        except FedpflError as error:
            print(f"fedpfl: {error}", file=sys.stderr)
            failed = True
    return 2 if failed else 0


<<<<<<< HEAD
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
        raise FedpflError(f"cannot write {out}: {reason(error)}; choose a new folder where there is room") from None
    return len(run)


def log(run: Trained, logger: Mapping[str, Any]) -> int:
    """Send a run that is over to loggers, as it would have done, but for rounds that they have; returns its rounds.

    logger: that part of a configuration. Raises FedpflError for a run that is being written, and for a logger that
    fails.
    """
    info, summary, picture = _told(run), _summary(run), run.path / "partition.png"
    status = "interrupted" if run.status == "running" else run.status
    try:
        held = lock.take(run.path)
    except OSError as error:
        raise files.refused(run.path, error) from None
    try:
        for sink in mirrors(logger):
            try:
                sink.begin(info)
                if picture.exists():
                    sink.picture("partition", picture)
                sink.end(status, summary)
            except Exception as error:
                raise FedpflError(f"{run.path} is not logged, {type(sink).__name__} failed: {reason(error)}") from error
            finally:
                with contextlib.suppress(Exception):
                    sink.end("failed", {})  # does nothing where it has ended
    finally:
        lock.release(held, run.path.resolve())
    return info.start_round


def _summary(run: Trained) -> dict[str, Any]:
    """What the run itself knew of summary.json."""
    return {key: value for key, value in run.summary.items() if key != "digest"}


def _told(run: Trained) -> RunInfo:
    """What the run's sinks were told, but as of one that resumes after its last round."""
    config, summary = run.config, _summary(run)
    method, dataset, seed = config["method"]["name"], config["dataset"]["name"], config["seed"]
    own = identity(config)
    parts = run.path.resolve().parts
    usual = parts[-3:] == (method, own, f"seed{seed}") and len(parts) > 4
    kind = METHODS[method].__name__ if method in METHODS else method
    used = summary.get("engine", {})
    # Where nothing was to choose, the name that was asked for is recorded.
    backend = "loop" if (used.get("backend"), used.get("device")) == ("auto", "cpu") else used.get("backend")
    tags = (
        *(dataset, config["partition"]["name"], config["model"]["name"]),
        *(backend, config.get("engine", {}).get("precision")),
    )
    rounds = run.rounds["round"]
    return RunInfo(
        name="-".join(filter(None, (config.get("name"), kind, own, f"seed{seed}"))),
        group=parts[-4] if usual else dataset,
        job_type=method,
        tags=tuple(filter(None, tags)),
        config=config,
        path=run.path,
        identity=own,
        seed=seed,
        rounds=config["rounds"],
        start_round=int(rounds.iloc[-1]) if len(rounds) else 0,
        facts=summary,
    )


=======
>>>>>>> main
if __name__ == "__main__":
    raise SystemExit(main())
