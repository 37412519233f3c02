"""Files with a network's state_dict, from which it may start."""

import hashlib
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors import torch as safetensors
from torch import Tensor

from fedpfl.data.provenance import Provenance, Weights
from fedpfl.ground.errors import FedpflError

HASH = re.compile(r"-([0-9a-f]{8,})\.\w+$")  # as torch.hub names its files


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Return the values of `read_weights`."""
    return read_weights(path).values


def read_weights(path: Path) -> Weights:
    """Read the tensors of a file written by `torch.save(network.state_dict(), path)` or by
    safetensors, on the CPU.

    Raises FedpflError if it is missing or broken, also by the hash in its name, where it has one.
    """
    if not path.is_file():
        raise FedpflError(
            f"model.weights: there is no file {path}; put it there, or give its full path"
        )
    if expected := HASH.search(path.name):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if not digest.startswith(expected[1]):
            raise FedpflError(
                f"model.weights: SHA-256 of {path} begins with {digest[: len(expected[1])]}; fetch it again"
            )
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                provenance = Provenance.from_header(file.metadata())
            return Weights(safetensors.load_file(path), str(path), provenance)
        if zipfile.is_zipfile(path):  # not so torch's older format, which has no checksums
            with zipfile.ZipFile(path) as archive:
                if (member := archive.testzip()) is not None:  # torch does not compare them
                    raise ValueError(f"its part {member} is damaged")
        values: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler raises whatever it stumbles over
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if reason.startswith("Weights only"):  # goes on with advice to load what may run code
            reason = "it is no file of torch.save's, or holds more than tensors"
        raise FedpflError(f"model.weights: {path} cannot be read ({reason})") from None
    if not isinstance(values, Mapping) or not all(
        isinstance(value, Tensor) for value in values.values()
    ):
        raise FedpflError(
            f"model.weights: {path} must hold a network's state_dict and nothing else"
        )
    return Weights(dict(values), str(path), Provenance.from_state(values))
