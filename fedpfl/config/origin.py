"""Read a network's initial values, and find out whether they saw samples that judge models here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedpfl.config.dealing import DealtData
from fedpfl.data import state_dict
from fedpfl.data.state_dict import Weights
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Values
from fedpfl.privacy import Guarantee
from fedpfl.record import run_files


@dataclass(frozen=True)
class WeightsOrigin:
    """Describe a run's initial values.

    Attributes:
        path: Their file or run, "" for random values.
        line: The line for the user.
        caveat: The note in tables, "" for none.
    """

    path: str = ""
    line: str = ""
    caveat: str = ""


def find_weights(folder: Path, model: Values, adapter: Values) -> Weights | None:
    """Read initial values from a file, a finished run's server or peft's folder.

    Args:
        folder: Of data sets.
        model: The network's options. `arch` may be a folder; the network reads the values there.
        adapter: The options of the adapter, which peft's folder must fit.

    Raises:
        FedpflError: They are absent or damaged, or the server has no single model.
    """
    weights_path = model.get("weights")
    if not weights_path:
        arch = model.get("arch")
        return Weights({}, arch) if arch and Path(arch).is_dir() else None
    path = folder / weights_path  # absolute paths stay
    if not path.exists() and weights_path.exists():
        path = weights_path
    if not path.is_dir():
        return state_dict.read_weights(path)
    if (path / state_dict.ADAPTER_CONFIG).is_file():
        return state_dict.read_adapter(path, adapter)
    summary, state = run_files.read_finished_run(path)
    # Methods call what all clients train `model`, or `body` where only that is common.
    server = state["server"].get("model", state["server"].get("body", state["server"]))
    values = {**server, **state["server_buffers"].get("main", {})}
    if not values or not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise FedpflError(
            f"model.weights: the method of the run in {path} has no single model at the server"
        )
    samples_digest, trained_on = run_files.read_training_samples(path, summary)
    return Weights(values, str(path), samples_digest, trained_on, summary.get("caveat", ""))


def trace_origin(
    weights: Weights | None, dealt_data: DealtData, overlap: bool, privacy: Guarantee | None
) -> WeightsOrigin:
    """Describe initial values; compare a run's training samples with those that judge models here.

    Args:
        weights: The initial values, None for random ones.
        dealt_data: The samples, and who holds which.
        overlap: `model.overlap`, whether weights may have seen samples that are tested here.
        privacy: The run's guarantee.

    Raises:
        FedpflError: The weights saw samples that are tested here, or break a promise of privacy.
    """
    if weights is None:
        return WeightsOrigin()
    path = weights.path
    is_same_data = dealt_data.samples_digest == weights.samples_digest
    if privacy and (is_same_data or not privacy.public_weights):
        raise FedpflError(
            f"privacy={privacy.hides}: model.weights={path} may give away samples of these clients;"
            " start from public weights and set privacy.public_weights=true"
        )
    if not is_same_data:
        note = weights.caveat or "samples that are tested here may be among its training samples"
        return WeightsOrigin(path, f"{path}: {note}", f"{path}: {note}")
    splits = [*dealt_data.federation.test, *dealt_data.federation.validation]
    if newcomers := dealt_data.newcomers:
        splits += [*newcomers.train, *newcomers.test, *newcomers.validation]
    judging = torch.cat(splits).numpy()
    count = int(np.isin(judging, weights.trained_on).sum())
    if not count:
        line = f"{path}: none of its training samples is tested or held out here"
        return WeightsOrigin(path, line, weights.caveat)
    caveat = (
        f"{path} was trained on {count:,} of the {len(judging):,} samples that are tested or held"
        " out here"
    )
    if not overlap:
        raise FedpflError(
            f"model.weights: {caveat}, so that accuracies would flatter; give the seed, partition"
            " (partition.by_name=false before 0.3.0), validation, unseen and unseen_groups that it"
            " had, or set model.overlap=true"
        )
    return WeightsOrigin(path, f"{caveat}: accuracies flatter (model.overlap=true)", caveat)
