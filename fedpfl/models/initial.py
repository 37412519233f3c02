"""Initial values from elsewhere, such as torchvision's ImageNet weights."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.models.resnet import ResNet


def start_from(module: nn.Module, values: Mapping[str, Tensor], head: tuple[str, ...]) -> None:
    """Copy a state_dict into a network of the same kind; a ResNet also takes torchvision's of the
    same depth.

    A vision transformer also takes torchvision's, timm's and those of Hugging Face's transformers;
    of another size of images the embeddings of places are interpolated. Where the classifier
    (`head`, full names) has other shapes there, or there is none, the network's own stays as it was
    drawn. Raises ValueError, and changes nothing then, if anything else differs.
    """
    values = _translated(values) if isinstance(module, ResNet) else _as_torchvisions(module, values)
    current = module.state_dict()
    for name in values.keys() & current.keys():
        if name.endswith(PLACES) and values[name].shape != current[name].shape:
            values[name] = _resized(values[name], current[name])
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
        if current[name].is_floating_point() and not (
            values[name].is_floating_point() and values[name].isfinite().all()
        ):
            raise ValueError(
                f"{name} of model.weights ({values[name].dtype}) holds numbers that are no "
                "finite floats"
            )
    module.load_state_dict(values)


def _translated(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names of torchvision's ResNets as ours; others stay."""
    places = [
        (int(a), int(b))
        for a, b in re.findall(r"layer(\d+)\.(\d+)\.conv1\.weight", " ".join(values))
    ]
    number = {place: i for i, place in enumerate(sorted(places))}
    ours = {}
    for name, value in values.items():
        if block := re.match(r"layer(\d+)\.(\d+)\.(.*)", name):
            inside = block[3].replace("bn", "norm").replace("downsample", "project")
            name = f"blocks.{number.get((int(block[1]), int(block[2])), block[2])}.{inside}"
        elif number:
            name = re.sub(
                r"^(conv|bn)1\.", lambda stem: {"conv": "conv.", "bn": "norm."}[stem[1]], name
            )
            name = re.sub(r"^fc\.", "classifier.", name)
        ours[name] = value
    return ours


PLACES = ("pos_embedding", "pos_embed")
DIALECTS = [
    [  # torchvision's; attention here is `Attention`
        (r"\.in_proj_(weight|bias)$", r".qkv.\1"),
        (r"\.out_proj\.", ".proj."),
    ],
    [  # timm's
        (r"^cls_token$", "class_token"),
        (r"^pos_embed$", "encoder.pos_embedding"),
        (r"^patch_embed\.proj\.", "conv_proj."),
        (r"^norm\.", "encoder.ln."),
        (r"^head\.", "heads.head."),
        (r"^blocks\.(\d+)\.", r"encoder.layers.encoder_layer_\1."),
        (r"\.norm([12])\.", r".ln_\1."),
        (r"\.attn\.", ".self_attention."),
        (r"\.mlp\.fc1\.", ".mlp.0."),
        (r"\.mlp\.fc2\.", ".mlp.3."),
    ],
    [  # Hugging Face's transformers'
        (r"^vit\.", ""),
        (r"^embeddings\.cls_token$", "class_token"),
        (r"^embeddings\.position_embeddings$", "encoder.pos_embedding"),
        (r"^embeddings\.patch_embeddings\.projection\.", "conv_proj."),
        (r"^layernorm\.", "encoder.ln."),
        (r"^classifier\.", "heads.head."),
        (r"^encoder\.layer\.(\d+)\.", r"encoder.layers.encoder_layer_\1."),
        (r"\.layernorm_before\.", ".ln_1."),
        (r"\.layernorm_after\.", ".ln_2."),
        (r"\.attention\.output\.dense\.", ".self_attention.proj."),
        (r"\.attention\.attention\.", ".self_attention."),
        (r"\.intermediate\.dense\.", ".mlp.0."),
        (r"\.output\.dense\.", ".mlp.3."),
    ],
]
"""How a vision transformer's names elsewhere are turned into ours: torchvision's, but for
attention.
"""


def _as_torchvisions(module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values under the names of our vision transformer where that makes names the
    network has.
    """
    wanted = set(module.state_dict())
    if "encoder.pos_embedding" not in wanted:
        return dict(values)
    found = dict(values)
    for dialect in DIALECTS:
        renamed = {_renamed(name, dialect): value for name, value in values.items()}
        packed = {}
        for name in [name for name in renamed if ".self_attention.query." in name]:
            parts = [renamed.pop(name.replace("query", part)) for part in ("query", "key", "value")]
            packed[name.replace("query", "qkv")] = torch.cat(parts)
        if len(wanted & {*renamed, *packed}) > len(wanted & found.keys()):
            found = {**renamed, **packed}
    return found


def _renamed(name: str, dialect: list[tuple[str, str]]) -> str:
    for pattern, place in dialect:
        name = re.sub(pattern, place, name)
    return name


def _resized(given: Tensor, wanted: Tensor) -> Tensor:
    """Return embeddings of a class token and of the places of a square, interpolated to another
    square.
    """
    old, new = (round((leaf.shape[1] - 1) ** 0.5) for leaf in (given, wanted))
    if (
        given.shape[-1] != wanted.shape[-1]
        or old**2 + 1 != given.shape[1]
        or new**2 + 1 != wanted.shape[1]
    ):
        return given  # which is refused
    square = given[:, 1:].unflatten(1, (old, old)).permute(0, 3, 1, 2)
    square = F.interpolate(
        square.float(), (new, new), mode="bicubic", antialias=True, align_corners=False
    )
    return torch.cat([given[:, :1], square.permute(0, 2, 3, 1).flatten(1, 2).to(given.dtype)], 1)
