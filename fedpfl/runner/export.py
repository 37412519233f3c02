"""What can be taken out of a run: its personal models as files, and its record for loggers."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpfl.ground import files, lock
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.identity import identity
from fedpfl.record.loggers import make_loggers
from fedpfl.runner.card import format_card
from fedpfl.runner.deploy import WRITERS
from fedpfl.runner.header import make_run_info
from fedpfl.runner.library import Trained


def write_models(
    run: Trained,
    out: Path,
    format_name: str = "pt",
    clients: Sequence[int | str] | None = None,
    baseline: Trained | None = None,
) -> int:
    """Write clients' personal models into a new folder, all or none.

    Beside them stand `card.md` and `config.yaml`.

    Args:
        run: Whose models they are.
        out: The folder.
        format_name: One of `deploy.WRITERS`.
        clients: Their numbers or names; None: all of them.
        baseline: A run of FedAvg that the card compares with.

    Returns:
        How many there are.

    Raises:
        FedpflError: The folder exists or cannot be written, there is no such client, or a model
            cannot be written in this format.
    """
    # ---- Step 1: what is written, and the card
    if out.exists() and not (out.is_dir() and next(out.iterdir(), None) is None):
        raise FedpflError(f"{out} exists; name a new folder")
    numbers = [*range(len(run))] if clients is None else [run.client_number(c) for c in clients]
    ending, write = WRITERS[format_name]
    files = {number: f"{_file_stem(run, number)}{ending}" for number in numbers}
    card = format_card(run, format_name, files, baseline)

    # ---- Step 2: into a folder beside, which gets its name once all is there
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
            models = Path(folder) / "models"
            models.mkdir()
            for number, name in files.items():
                write(run, number, models / name)
            (models / "card.md").write_text(card, encoding="utf-8")
            shutil.copyfile(run.path / "config.yaml", models / "config.yaml")
            models.rename(out)  # refused where something is
    except (OSError, RuntimeError) as error:  # torch hides a full disk behind the second
        raise FedpflError(
            f"cannot write {out}: {error_text(error)}; choose a new folder where there is room"
        ) from None
    return len(files)


def _file_stem(run: Trained, number: int) -> str:
    """Return what a client's file is called: by its name where that can be one."""
    name = run.client_names.get(number, "")
    is_plain = re.fullmatch(r"[\w][\w .-]{0,99}", name) is not None
    is_alone = [*map(str.casefold, run.client_names.values())].count(name.casefold()) == 1
    return name if is_plain and is_alone else f"client{number}"


def send_to_loggers(run: Trained, logger: Mapping[str, Any]) -> int:
    """Send a run that is over to loggers, but for rounds that they have.

    Args:
        run: which is over.
        logger: that part of a configuration.

    Returns:
        How many rounds the run has.

    Raises:
        FedpflError: for a run that is being written, and for a logger that fails.
    """
    # ---- Step 1: describe the run as it would have described itself.
    config = run.config
    summary = {key: value for key, value in run.summary.items() if key != "digest"}
    group = _find_logger_group(run)
    round_numbers = run.rounds["round"]
    rounds_done = int(round_numbers.iloc[-1]) if len(round_numbers) else 0
    engine_record = summary.get("engine", {})
    backend = engine_record.get("backend")
    # Where nothing was to choose, the name that was asked for is recorded.
    if (backend, engine_record.get("device")) == ("auto", "cpu"):
        backend = "loop"
    run_info = make_run_info(
        config,
        run.path,
        summary,
        group,
        backend,
        start_round=rounds_done,
    )

    # ---- Step 2: each logger takes what it lacks, while nobody else writes the run.
    with files.explain_write_errors(run.path):
        lock_handle = lock.acquire_lock(run.path)
    try:
        for mirror in make_loggers(logger):
            try:
                mirror.on_begin(run_info)
                mirror.on_end("interrupted" if run.status == "running" else run.status, summary)
            except Exception as error:
                logger_name = type(mirror).__name__
                raise FedpflError(
                    f"{run.path} is not logged, {logger_name} failed: {error_text(error)}"
                ) from error
            finally:
                with contextlib.suppress(Exception):
                    mirror.on_end("failed", {})  # does nothing where it has ended
    finally:
        lock.release_lock(lock_handle, run.path.resolve())
    return rounds_done


def _find_logger_group(run: Trained) -> str:
    """Return the folder that groups runs, as loggers name it; elsewhere the data set's name."""
    config = run.config
    parts = run.path.resolve().parts
    default_parts = (config["method"]["name"], identity(config), f"seed{config['seed']}")
    if parts[-3:] == default_parts and len(parts) > 4:
        return parts[-4]
    return config["dataset"]["name"]
