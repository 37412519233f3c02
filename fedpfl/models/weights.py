"""Initial values from a file, such as torchvision's ImageNet weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedpfl.errors import FedpflError
from fedpfl.models.resnet import ResNet

HASH = re.compile(r"-([0-9a-f]{8,})\.\w+$")  # as torch.hub names its files


def load(module: nn.Module, path: Path, head: tuple[str, ...]) -> None:
    """Copy the tensors of a file written by `torch.save(network.state_dict(), path)` into a network.

    A ResNet also takes those of torchvision's of the same depth. Where the file's classifier (`head`, full names) has
    other shapes, or there is none, the network's own stays as it was drawn. Raises FedpflError, and changes nothing
    then, if the file is missing, broken (also by the hash in its name, where it has one) or of another network.
    """
    values = _read(path)
    if isinstance(module, ResNet):
        values = _translated(values)
    own = module.state_dict()
    mine = {name: own[name].shape for name in head}
    if any(name not in values or values[name].shape != shape for name, shape in mine.items()):
        values = {name: value for name, value in values.items() if name not in head} | {
            name: own[name] for name in head
        }
    for name in (*own, *values):
        if name not in values:
            raise FedpflError(f"model.weights: {path} has no {name}, which the network has")
        if name not in own:
            raise FedpflError(f"model.weights: {path} has {name}, which the network lacks")
        if values[name].shape != own[name].shape:
            has, wanted = (list(value.shape) for value in (values[name], own[name]))
            raise FedpflError(f"model.weights: {name} in {path} is {has}, the network's is {wanted}")
    module.load_state_dict(values)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FedpflError(f"model.weights: there is no file {path}; put it there, or give its full path")
    if expected := HASH.search(path.name):
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if not found.startswith(expected[1]):
            raise FedpflError(
                f"model.weights: SHA-256 of {path} begins with {found[: len(expected[1])]}; fetch it again"
            )
    try:
        values: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler raises whatever it stumbles over
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise FedpflError(f"model.weights: {path} cannot be read ({reason})") from None
    if not isinstance(values, Mapping) or not all(isinstance(value, Tensor) for value in values.values()):
        raise FedpflError(f"model.weights: {path} must hold a network's state_dict and nothing else")
    return dict(values)


def _translated(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of torchvision's ResNets as ours; others stay."""
    places = [(int(a), int(b)) for a, b in re.findall(r"layer(\d+)\.(\d+)\.conv1\.weight", " ".join(values))]
    number = {place: i for i, place in enumerate(sorted(places))}
    ours = {}
    for name, value in values.items():
        if block := re.match(r"layer(\d+)\.(\d+)\.(.*)", name):
            inside = block[3].replace("bn", "norm").replace("downsample", "project")
            name = f"blocks.{number.get((int(block[1]), int(block[2])), block[2])}.{inside}"
        elif number:
            name = re.sub(r"^(conv|bn)1\.", lambda stem: {"conv": "conv.", "bn": "norm."}[stem[1]], name)
            name = re.sub(r"^fc\.", "classifier.", name)
        ours[name] = value
    return ours
