"""Initial values from elsewhere, such as torchvision's ImageNet weights."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.models.resnet import ResNet


def start_from(module: nn.Module, values: Mapping[str, Tensor], head: tuple[str, ...]) -> None:
    """Copy a state_dict into a network of the same kind.

    A ResNet also takes torchvision's of the same depth.

    So does a vision transformer; for another size of images its embeddings of places are
    interpolated. Where the classifier
    (`head`, full names) has other shapes there, or there is none, the network's own stays as it was
    drawn. Raises ValueError if anything else differs.
    """
    # ---- Names, and the embeddings of positions, as the network has them.
    if isinstance(module, ResNet):
        values = _translate_resnet(values)
    else:
        values = _translate_transformer(values)
    current = module.state_dict()
    for name in values.keys() & current.keys():
        if name.endswith(POSITIONS) and values[name].shape != current[name].shape:
            values[name] = _resize_positions(values[name], current[name].shape)

    # ---- A classifier for other classes stays as it was drawn.
    if any(name not in values or values[name].shape != current[name].shape for name in head):
        values = {name: value for name, value in values.items() if name not in head}
        values |= {name: current[name] for name in head}

    try:
        module.load_state_dict(values)
    except RuntimeError as error:
        raise ValueError(f"model.weights: {error}") from None


def start_additions_from(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy low-rank additions, and a head if any, into an adapted network.

    Raises ValueError if they are of other layers or another rank.
    """
    missing, unknown = module.load_state_dict(values, strict=False)
    unfit = [*unknown, *(name for name in missing if ".lora_" in name)]
    if unfit:
        raise ValueError(f"model.weights and adapter.layers differ, as in {unfit[0]}")


def _translate_resnet(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of torchvision's ResNet under our names; other names stay."""
    # ---- torchvision numbers blocks by stage, ours are numbered through.
    pairs = re.findall(r"layer(\d+)\.(\d+)\.conv1\.weight", " ".join(values))
    blocks = sorted((int(stage), int(block)) for stage, block in pairs)
    numbers = {block: number for number, block in enumerate(blocks)}

    # ---- Blocks, then stem and classifier.
    ours = {}
    for name, value in values.items():
        if match := re.match(r"layer(\d+)\.(\d+)\.(.*)", name):
            stage, block, inside = match.groups()
            inside = inside.replace("bn", "norm").replace("downsample", "project")
            number = numbers.get((int(stage), int(block)), block)
            name = f"blocks.{number}.{inside}"
        elif numbers:
            name = re.sub(r"^conv1\.", "conv.", name)
            name = re.sub(r"^bn1\.", "norm.", name)
            name = re.sub(r"^fc\.", "classifier.", name)
        ours[name] = value
    return ours


POSITIONS = "pos_embedding"


def _translate_transformer(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Translate names of torchvision's attention into those of `Attention`; other names stay."""
    ours = {}
    for name, value in values.items():
        name = re.sub(r"\.in_proj_(weight|bias)$", r".qkv.\1", name)
        ours[name.replace(".out_proj.", ".proj.")] = value
    return ours


def _resize_positions(positions: Tensor, shape: torch.Size) -> Tensor:
    """Interpolate the embeddings of a square of positions to another square.

    The class token's, which comes first, stays.
    """
    old_side = round((positions.shape[1] - 1) ** 0.5)
    new_side = round((shape[1] - 1) ** 0.5)
    are_squares = old_side**2 + 1 == positions.shape[1] and new_side**2 + 1 == shape[1]
    if not are_squares or positions.shape[-1] != shape[-1]:
        return positions  # which is refused
    class_token = positions[:, :1]
    square = positions[:, 1:].unflatten(1, (old_side, old_side)).permute(0, 3, 1, 2)
    square = F.interpolate(
        square.float(),
        (new_side, new_side),
        mode="bicubic",
        antialias=True,
        align_corners=False,
    )
    resized = square.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)
    return torch.cat([class_token, resized], 1)
