"""Initial values from elsewhere, such as torchvision's ImageNet weights."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, nn

from fedpfl.models.resnet import ResNet


def start_from(module: nn.Module, values: Mapping[str, Tensor], head: tuple[str, ...]) -> None:
    """Copy a state_dict into a network of the same kind; a ResNet also takes torchvision's of the same depth.

    Where the classifier (`head`, full names) has other shapes there, or there is none, the network's own stays as it
    was drawn. Raises ValueError, and changes nothing then, if anything else differs.
    """
    values = _translated(values) if isinstance(module, ResNet) else dict(values)
    current = module.state_dict()
    if any(name not in values or values[name].shape != current[name].shape for name in head):
        values = {name: value for name, value in values.items() if name not in head} | {
            name: current[name] for name in head
        }
    for name in (*current, *values):
        if name not in values:
            raise ValueError(f"model.weights has no {name}, which the network has")
        if name not in current:
            raise ValueError(f"model.weights has {name}, which the network lacks")
        if values[name].shape != current[name].shape:
            has, wanted = (list(value.shape) for value in (values[name], current[name]))
            raise ValueError(f"{name} of model.weights is {has}, the network's is {wanted}")
    module.load_state_dict(values)


def _translated(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
