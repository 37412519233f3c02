"""Where a network's initial values are from, and whether a run may start from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedpfl.data import Federation, state_dict
from fedpfl.data.provenance import Provenance, Weights, pick_hashes
from fedpfl.ground.errors import FedpflError, escape_controls
from fedpfl.privacy import Privacy
from fedpfl.record import rundir


@dataclass(frozen=True, eq=False)
class WeightsOrigin:
    """Say where a run's initial values are from.

    place: a file or a run, "" for none. line: what a user is told of it. caveat: what tables say of
    it, "" for nothing.
    trained: what the run's own models will have been trained on.
    """

    place: str
    line: str
    caveat: str
    trained: Provenance


def find_weights(folder: Path, given: Path | None) -> Weights | None:
    """Return the initial values in a file, or the model at the server of a finished run.

    Raises FedpflError.
    """
    if not given:
        return None
    place = folder / given  # absolute paths stay
    if not place.exists() and given.exists():
        place = given
    if not place.is_dir():
        return state_dict.read_weights(place)
    summary, state = rundir.read_finished_run(place)
    server = state["server"].get("model", state["server"].get("body", state["server"]))
    values = {**server, **state["server_buffers"].get("main", {})}
    if not values or not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise FedpflError(
            f"model.weights: the method of the run in {place} has no single model at the server"
        )
    return Weights(values, str(place), rundir.read_provenance(place, summary))


def trace_origin(
    *,
    weights: Weights | None,
    hashes: np.ndarray,
    federation: Federation,
    unseen: Federation | None,
    overlap: bool,
    privacy: Privacy | None,
) -> WeightsOrigin:
    """Return where the values are from. hashes: of all samples. overlap: `model.overlap`.

    Raises FedpflError where they were trained on samples that are tested here, or break a promise
    of privacy.
    """
    trained_here = pick_hashes(hashes, federation.train)
    if weights is None:
        return WeightsOrigin("", "", "", Provenance().joined_with(trained_here))
    splits = [*federation.test, *federation.validation]
    if unseen:
        splits += [*unseen.train, *unseen.test, *unseen.validation]
    evaluated_hashes = pick_hashes(hashes, splits)
    source = weights.provenance_or_unrecorded
    if privacy:
        everybody = np.concatenate([trained_here, evaluated_hashes])
        _check_privacy(weights.path, source, everybody, privacy)

    # A sample that a client here trains on as well gives nothing away: some data sets hold samples
    # twice.
    leaked = source.are_seen(evaluated_hashes) & ~np.isin(evaluated_hashes, trained_here)
    count, total = int(leaked.sum()), len(evaluated_hashes)
    if count and not overlap:
        raise FedpflError(
            f"model.weights: {weights.path} was trained on {count:,} of the {total:,} samples that"
            " are tested or held out here, so that accuracies would flatter; give the seed,"
            " partition, validation and unseen that it had, or model.overlap=true, which goes on"
            " and says so in tables"
        )
    line_text = (
        f"trained on {len(source.samples):,} samples, none of which is tested or held out here"
    )
    caveat = ""
    if count:
        caveat = (
            f"{weights.path} was trained on {count:,} of the {total:,} samples that are tested or"
            " held out here"
        )
        line_text = (
            f"it {caveat.removeprefix(weights.path).strip()}: accuracies flatter"
            " (model.overlap=true)"
        )
    elif source.unrecorded:
        names = _list_names(source.unrecorded)
        caveat = (
            f"what {names} was trained on is not recorded, perhaps on samples that are tested here"
        )
        line_text = caveat
    return WeightsOrigin(
        weights.path, f"{weights.path}: {line_text}", caveat, source.joined_with(trained_here)
    )


def _check_privacy(place: str, source: Provenance, everybody: np.ndarray, privacy: Privacy) -> None:
    """Raise FedpflError for weights that may give these clients away, of which no account is kept."""
    seen_count = int(source.are_seen(everybody).sum())
    if seen_count:
        raise FedpflError(
            f"privacy=client: model.weights={place} was trained on {seen_count:,} samples of these"
            " clients, and gives them away beyond what is accounted for; start from public"
            " weights, or go on with a private run by extend"
        )
    if source.unrecorded and not privacy.public_weights:
        raise FedpflError(
            f"privacy=client: nobody knows whether {_list_names(source.unrecorded)} was trained on"
            " samples of these clients; where you know that it was not,"
            " privacy.public_weights=true"
        )


def _list_names(names: Sequence[str]) -> str:
    """Return names for a line, which a file may have brought along."""
    more_text = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return escape_controls(", ".join(names[:3])) + more_text
