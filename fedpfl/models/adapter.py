"""Adapters: which parameters of a pretrained network train, while the rest is frozen.

Frozen parameters have requires_grad False. The head always trains. Each function changes a module
in place, which has its pretrained values by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrize

from fedpfl.ground.ranges import Count, Positive
from fedpfl.ground.records import Record
from fedpfl.models.wiring import has_users_forward

QKV_ROLES = ("q", "k", "v")
"""Roles of the blocks of rows of one linear map, named qkv."""
ROLES = (*QKV_ROLES, "proj", "mlp", "linear", "conv")
ALL_LINEAR = "all-linear"
"""Stands for each linear map but the head, as in peft."""


class LowRank:
    """Shared by low-rank additions: pairs lora_A and lora_B, lora_A1 and lora_B1, ...

    Several additions are weighted by a softmax of lora_mixer's image of the same input, at each
    position. Beside a single one there may be lora_residue, a matrix of the product's shape that a
    method holds still.

    Attributes:
        pairs: Number of pairs.
        scale: Factor of the addition.
        lora_mixer: The map to the pairs' weights; only with several pairs.
        axis: The axis of images with an entry per pair.
    """

    pairs: int
    scale: float
    lora_mixer: nn.Parameter
    axis: int

    def _down(self, x: Tensor, a: Tensor) -> Tensor:
        raise NotImplementedError

    def _up(self, low: Tensor, b: Tensor) -> Tensor:
        raise NotImplementedError

    def addition(self, x: Tensor) -> Tensor:
        """Compute the addition to the layer's output for an input."""
        # The first pair has no number, so that a network with one keeps its names.
        suffixes = [str(pair or "") for pair in range(self.pairs)]
        images = [
            self._up(
                self._down(x, getattr(self, f"lora_A{suffix}")), getattr(self, f"lora_B{suffix}")
            )
            for suffix in suffixes
        ]
        if self.pairs == 1:
            residue = getattr(self, "lora_residue", None)
            if residue is None:
                return self.scale * images[0]
            return self.scale * (images[0] + self._down(x, residue))
        shares = self._down(x, self.lora_mixer).softmax(self.axis).split(1, self.axis)
        weighted = [share * image for share, image in zip(shares, images, strict=True)]
        return self.scale * sum(weighted[1:], weighted[0])


class LoRALinear(LowRank, nn.Linear):
    """A linear map with low-rank additions to its weight (Hu et al., ICLR 2022, arXiv:2106.09685).

    W x + b becomes (W + scale B A) x + b, for each of `adapted_blocks` among `blocks` blocks of
    rows of
    W: lora_A `[adapted, rank, inputs]`, lora_B `[adapted, rows, rank]`, lora_mixer
    `[adapted, pairs, inputs]`.
    """

    adapted_blocks: tuple[int, ...]
    blocks: int
    axis = -1

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`."""
        addition = self.addition(x)
        if self.blocks == 1:
            return super().forward(x) + addition.squeeze(-2)
        # Blocks that are not adapted, such as the keys of qkv, get nothing added.
        zeros = torch.zeros_like(addition[..., 0, :])
        rows = [
            addition[..., self.adapted_blocks.index(block), :]
            if block in self.adapted_blocks
            else zeros
            for block in range(self.blocks)
        ]
        return super().forward(x) + torch.cat(rows, -1)

    def _down(self, x: Tensor, a: Tensor) -> Tensor:
        return F.linear(x, a.flatten(0, 1)).unflatten(-1, (len(self.adapted_blocks), -1))

    def _up(self, low: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("...cr,cor->...co", low, b)


class LoRAConv2d(LowRank, nn.Conv2d):
    """A convolution with a low-rank addition.

    lora_A and lora_mixer are convolutions like it to `rank` and `pairs` channels, and lora_B is a
    1x1 convolution of lora_A's output.
    """

    axis = 1

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, channels, height, width]` to the same with other channels."""
        return super().forward(x) + self.addition(x)

    def _down(self, x: Tensor, a: Tensor) -> Tensor:
        return self._conv_forward(x, a, None)

    def _up(self, low: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(low, b)


def none(module: nn.Module, head: str, seed: int) -> None:
    """Freeze nothing."""


def head(module: nn.Module, head: str, seed: int) -> None:
    """Train the head alone: a linear probe."""
    _freeze(module, head, lambda name: False)


def bitfit(module: nn.Module, head: str, seed: int) -> None:
    """Train all biases (Ben Zaken et al., ACL 2022, arXiv:2106.10199)."""
    _freeze(module, head, lambda name: name.endswith("bias"))


def lora(  # noqa: PLR0913 - its arguments are keys of the configuration
    module: nn.Module,
    head: str,
    seed: int,
    rank: Count | tuple[Count, ...] = 8,
    alpha: Positive = 16.0,
    layers: tuple[str, ...] = ("q", "v"),
    pairs: Count = 1,
    rslora: bool = False,
) -> None:
    """Train low-rank additions to the layers with some roles, scaled by alpha / rank.

    The end of a layer's name, such as q_proj, and `all-linear` are roles too, as in peft. With `rslora`
    the scale is alpha / sqrt(rank) (Kalajdzievski, arXiv:2312.03732). Several `pairs` have a mixer.
    B is zero at the start, so that the network is the pretrained one bit for bit; A and the mixer
    are drawn from `seed`, as PyTorch draws a linear map. Of several ranks, which are dealt to
    clients, the network has the largest.

    Raises:
        ValueError: For roles that no layer has, or a rank that is too large for a layer.
    """
    # ---- Step 1: which layers have the roles.
    if rank == ():
        raise ValueError("adapter.rank must be a number or several, got []")
    rank = max(rank) if isinstance(rank, tuple) else rank
    roles_by_layer = dict(_layer_roles(module, head, layers))
    all_roles = {role for roles in roles_by_layer.values() for role in roles}
    all_roles |= {name.rpartition(".")[2] for name in roles_by_layer} - {*ROLES}
    for role in layers:
        if role not in all_roles:
            present = ", ".join(sorted(all_roles)) or "none"
            raise ValueError(f"adapter.layers: the network has no {role}; it has {present}")

    # ---- Step 2: freeze all but the head.
    _freeze(module, head, lambda name: False)
    for encoder in module.modules():
        # In evaluation it reads the weights of its layers, past their additions, unless it has a
        # hook.
        if isinstance(encoder, nn.TransformerEncoderLayer):
            encoder.register_forward_pre_hook(_do_nothing)

    # ---- Step 3: add to those layers, drawing in their order.
    generator = Generator().manual_seed(seed)
    for name, roles in roles_by_layer.items():
        adapted_blocks = tuple(block for block, role in enumerate(roles) if role in layers)
        if adapted_blocks:
            layer: Any = module.get_submodule(name)
            rows = len(layer.weight) // len(roles)
            room = min(rows, layer.weight[0].numel())
            if rank > room:
                raise ValueError(f"adapter.rank={rank} is more than {name} has room for, {room}")
            _add_low_rank(
                layer,
                rank=rank,
                scale=alpha / (rank**0.5 if rslora else rank),
                adapted_blocks=adapted_blocks,
                blocks=len(roles),
                pairs=pairs,
                generator=generator,
            )


def lora_with_residue(module: nn.Module, head: str, seed: int, **options: Any) -> None:
    """Adapt by `lora`, and add a zero matrix of B A's shape to each layer."""
    lora(module, head, seed, **options)
    for layer in module.modules():
        if isinstance(layer, LoRALinear):
            rows = layer.out_features // layer.blocks
            shape = (len(layer.adapted_blocks), rows, layer.in_features)
            layer.lora_residue = nn.Parameter(torch.zeros(shape))
        elif isinstance(layer, LoRAConv2d):
            layer.lora_residue = nn.Parameter(torch.zeros_like(layer.weight))


def _do_nothing(*_: Any) -> None:
    """Be a hook."""


def require_additions(module: nn.Module, x: Tensor) -> None:
    """Raise ValueError where training does not call a layer that has low-rank additions.

    Args:
        module: The network, which calls may change.
        x: Samples.
    """
    names = [name for name, layer in module.named_modules() if isinstance(layer, LowRank)]
    layers = [module.get_submodule(name) for name in names]
    called: set[nn.Module] = set()
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, _: called.add(layer))
    with torch.no_grad():
        module.train()(x)
    for name, layer in zip(names, layers, strict=True):
        if layer not in called:
            raise ValueError(
                f"adapter.layers: forward does not call {name}(x), where an addition would act;"
                " call it, or leave out its role"
            )


ADAPTERS: dict[str, Callable[..., None]] = {
    "none": none,
    "head": head,
    "lora": lora,
    "bitfit": bitfit,
}


def _freeze(module: nn.Module, head: str, trains: Callable[[str], bool]) -> None:
    for name, leaf in module.named_parameters():
        leaf.requires_grad_(name.startswith(f"{head}.") or trains(name))


def _layer_roles(
    module: nn.Module, head: str, layers: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the names of layers with the roles of their blocks of rows.

    A layer that `layers` name by the end of its name, or by `all-linear`, is one block.
    """
    for name, layer in module.named_modules():
        parent, _, attribute = name.rpartition(".")
        if name == head or not _is_plain(layer):
            continue
        # It reads the weight of its projection, and does not call it.
        if isinstance(module.get_submodule(parent), nn.MultiheadAttention):
            continue
        own_names = [end for end in layers if end not in ROLES and f".{name}".endswith(f".{end}")]
        if own_names:
            yield name, tuple(own_names[:1])
        elif ALL_LINEAR in layers and isinstance(layer, nn.Linear):
            yield name, (ALL_LINEAR,)
        elif isinstance(layer, nn.Conv2d):
            # A grouped convolution has no A that reads all channels.
            if layer.groups == 1:
                yield name, ("conv",)
        elif attribute == "qkv":
            yield name, QKV_ROLES
        elif hasattr(module.get_submodule(parent), "qkv"):
            yield name, ("proj",)
        else:
            yield name, ("mlp" if "mlp" in name.lower() else "linear",)


def _is_plain(layer: nn.Module) -> bool:
    """Check whether a layer is a product with its weight, and nothing else."""
    return (
        isinstance(layer, nn.Linear | nn.Conv2d)
        and not has_users_forward(layer)
        and not parametrize.is_parametrized(layer)
    )


def _add_low_rank(
    layer: Any,
    *,
    rank: int,
    scale: float,
    adapted_blocks: tuple[int, ...],
    blocks: int,
    pairs: int,
    generator: Generator,
) -> None:
    """Turn a layer, in place, into one with low-rank additions."""
    weight = layer.weight

    # ---- Step 1: how A, the mixer and B are drawn.
    rows = len(weight) // blocks
    inputs = weight[0].numel()
    is_convolution = isinstance(layer, nn.Conv2d)

    def draw_parameter(count: int) -> nn.Parameter:
        shape: tuple[int, ...] = (len(adapted_blocks), count, inputs)
        if is_convolution:
            shape = (count, *weight.shape[1:])
        bound = inputs**-0.5
        return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))

    # ---- Step 2: the entries, B being zero.
    values: Record = {
        "pairs": pairs,
        "scale": scale,
        "adapted_blocks": adapted_blocks,
        "blocks": blocks,
    }
    zeros_shape = (rows, rank, 1, 1) if is_convolution else (len(adapted_blocks), rows, rank)
    for pair in range(pairs):
        values[f"lora_A{pair or ''}"] = draw_parameter(rank)
        values[f"lora_B{pair or ''}"] = nn.Parameter(torch.zeros(zeros_shape))
    if pairs > 1:
        values["lora_mixer"] = draw_parameter(pairs)

    # ---- Step 3: change the layer where it stands: the network refers to it by attributes of its
    # own.
    layer.__class__ = LoRAConv2d if is_convolution else LoRALinear
    for key, value in values.items():
        setattr(layer, key, value)
