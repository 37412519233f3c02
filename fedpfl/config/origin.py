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
from fedpfl.privacy import Guarantee
from fedpfl.record import run_files


@dataclass(frozen=True, eq=False)
class WeightsOrigin:
    """Say where a run's initial values are from.

    Attributes:
        path: of a file or a run, "" for none.
        line: what a user is told of it.
        caveat: what tables say of it, "" for nothing.
        trained: the samples that the run's own models will have been trained on.
    """

    path: str
    line: str
    caveat: str
    trained: Provenance


def find_weights(folder: Path, weights_path: Path | None) -> Weights | None:
    """Return initial values from a file or from the server of a finished run.

    Raises:
        FedpflError: where they are absent or damaged, or the server has no single model.
    """
    if not weights_path:
        return None
    path = folder / weights_path  # absolute paths stay
    if not path.exists() and weights_path.exists():
        path = weights_path
    if not path.is_dir():
        return state_dict.read_weights(path)
    summary, state = run_files.read_finished_run(path)
    # Methods call what all clients train `model`, or `body` where only that is common.
    server = state["server"].get("model", state["server"].get("body", state["server"]))
    values = {**server, **state["server_buffers"].get("main", {})}
    if not values or not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise FedpflError(
            f"model.weights: the method of the run in {path} has no single model at the server"
        )
    return Weights(values, str(path), run_files.read_provenance(path, summary))


def trace_origin(
    *,
    weights: Weights | None,
    hashes: np.ndarray | None,
    federation: Federation,
    newcomers: Federation | None,
    overlap: bool,
    privacy: Guarantee | None,
) -> WeightsOrigin:
    """Return where the values are from.

    Args:
        weights: the initial values, None for random ones.
        hashes: of all samples; None where they are at nodes.
        federation: the clients that take part.
        newcomers: those that never do.
        overlap: `model.overlap`, whether they may be trained on samples that are tested here.
        privacy: of the run.

    Raises:
        FedpflError: where they were trained on samples that are tested here, or break a promise of
            privacy.
    """
    # ---- Step 1: which samples are trained on, and which judge the models?
    if hashes is None:
        return _describe_unrecorded(weights)
    trained_here = pick_hashes(hashes, federation.train)
    if weights is None:
        return WeightsOrigin("", "", "", Provenance().joined_with(trained_here))
    evaluated_hashes = _pick_evaluated_hashes(hashes, federation, newcomers)
    source = weights.provenance_or_unrecorded
    if privacy:
        all_hashes = np.concatenate([trained_here, evaluated_hashes])
        _check_privacy(weights.path, source, all_hashes, privacy)

    # ---- Step 2: refuse weights that saw samples which judge them. One that a client here trains
    # on as well gives nothing away: some data sets hold samples twice.
    leaked = source.are_seen(evaluated_hashes) & ~np.isin(evaluated_hashes, trained_here)
    count = int(leaked.sum())
    overlap_text = (
        f"was trained on {count:,} of the {len(evaluated_hashes):,} samples that are tested or held"
        " out here"
    )
    if count and not overlap:
        raise FedpflError(
            f"model.weights: {weights.path} {overlap_text}, so that accuracies would flatter; give"
            " the seed, partition, validation and unseen that it had, or model.overlap=true, which"
            " goes on and says so in tables"
        )
    # ---- Step 3: say so to the user, and what is left to doubt in tables.
    caveat = f"{weights.path} {overlap_text}" if count else ""
    if count:
        line_text = f"it {overlap_text}: accuracies flatter (model.overlap=true)"
    elif source.unrecorded:
        caveat = line_text = (
            f"what {_list_names(source.unrecorded)} was trained on is not recorded, perhaps on"
            " samples that are tested here"
        )
    else:
        line_text = (
            f"trained on {len(source.samples):,} samples, none of which is tested or held out here"
        )
    trained = source.joined_with(trained_here)
    return WeightsOrigin(weights.path, f"{weights.path}: {line_text}", caveat, trained)


def _describe_unrecorded(weights: Weights | None) -> WeightsOrigin:
    """Return the origin of a run whose samples are at nodes.

    Raises:
        FedpflError: where there are weights.
    """
    if weights:
        raise FedpflError(
            f"model.weights={weights.path}: nobody can tell whether it was trained on samples that"
            " nodes test on; leave it out, or give dataset.path"
        )
    return WeightsOrigin("", "", "", Provenance(unrecorded=("a federation of nodes",)))


def _pick_evaluated_hashes(
    hashes: np.ndarray, federation: Federation, newcomers: Federation | None
) -> np.ndarray:
    """Return hashes of the samples that judge models; newcomers' training samples are of them."""
    splits = [*federation.test, *federation.validation]
    if newcomers:
        splits += [
            *newcomers.train,
            *newcomers.test,
            *newcomers.validation,
        ]
    return pick_hashes(hashes, splits)


def _check_privacy(path: str, source: Provenance, hashes: np.ndarray, privacy: Guarantee) -> None:
    """Raise FedpflError for weights that may have been trained on these clients' samples."""
    seen_count = int(source.are_seen(hashes).sum())
    if seen_count:
        raise FedpflError(
            f"privacy={privacy.hides}: model.weights={path} was trained on {seen_count:,} samples of"
            " these clients, and gives them away beyond what is accounted for; start from public"
            " weights, or go on with a private run by extend"
        )
    if source.unrecorded and not privacy.public_weights:
        raise FedpflError(
            f"privacy={privacy.hides}: nobody knows whether {_list_names(source.unrecorded)} was"
            " trained on samples of these clients; where you know that it was not,"
            " privacy.public_weights=true"
        )


def _list_names(names: Sequence[str]) -> str:
    """Return names for a line, which a file may have brought along."""
    more_text = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return escape_controls(", ".join(names[:3])) + more_text
