"""Adapters: what of a network trains where the rest is frozen. Frozen is what asks for no gradient.

The head always trains. Each function changes a module in place, whose values are the pretrained
ones by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fedpfl.ground.ranges import Above, AtLeast

PACKED = ("q", "k", "v")
"""Roles that are parts of one linear map, named qkv."""


class LowRank:
    """What low-rank additions have in common: pairs lora_A and lora_B, lora_A1 and lora_B1, ...

    Of several, the additions are weighed by a softmax of lora_mixer's image of the same input, at
    each place.
    """

    pairs: int
    scale: float
    lora_mixer: nn.Parameter
    axis: int
    """Where images have a number for each pair."""

    def _down(self, x: Tensor, a: Tensor) -> Tensor:
        raise NotImplementedError

    def _up(self, low: Tensor, b: Tensor) -> Tensor:
        raise NotImplementedError

    def added(self, x: Tensor) -> Tensor:
        """Return what is added to the layer's output for its input."""
        names = [str(pair or "") for pair in range(self.pairs)]
        each = [
            self._up(self._down(x, getattr(self, f"lora_A{n}")), getattr(self, f"lora_B{n}"))
            for n in names
        ]
        if self.pairs == 1:
            return self.scale * each[0]
        shares = self._down(x, self.lora_mixer).softmax(self.axis).split(1, self.axis)
        first, *others = (share * own for share, own in zip(shares, each, strict=True))
        return self.scale * sum(others, first)


class LoRALinear(LowRank, nn.Linear):
    """A linear map W x + b with low-rank additions to W (Hu et al., ICLR 2022, arXiv:2106.09685):
    scale B A x.

    One for each of `chosen` among `parts` blocks of rows: lora_A `[chosen, rank, inputs]`, lora_B
    `[chosen, rows, rank]`, lora_mixer `[chosen, pairs, inputs]`.
    """

    chosen: tuple[int, ...]
    parts: int
    axis = -1

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`."""
        added = self.added(x)
        if self.parts == 1:
            return super().forward(x) + added.squeeze(-2)
        nothing = torch.zeros_like(added[..., 0, :])
        rows = [
            added[..., self.chosen.index(p), :] if p in self.chosen else nothing
            for p in range(self.parts)
        ]
        return super().forward(x) + torch.cat(rows, -1)

    def _down(self, x: Tensor, a: Tensor) -> Tensor:
        return F.linear(x, a.flatten(0, 1)).unflatten(-1, (len(self.chosen), -1))

    def _up(self, low: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("...cr,cor->...co", low, b)


class LoRAConv2d(LowRank, nn.Conv2d):
    """A convolution with a low-rank addition: lora_A and lora_mixer are such ones to `rank` and
    `pairs` channels, and lora_B a convolution 1x1 of the former.
    """

    axis = 1

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, channels, height, width]` to the same with other channels."""
        return super().forward(x) + self.added(x)

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


def lora(
    module: nn.Module,
    head: str,
    seed: int,
    rank: Annotated[int, AtLeast(1)] = 8,
    alpha: Annotated[float, Above(0)] = 16.0,
    layers: tuple[str, ...] = ("q", "v"),
    pairs: Annotated[int, AtLeast(1)] = 1,
) -> None:
    """Train low-rank additions to some layers, by their roles, scaled by alpha / rank; several
    `pairs` with a mixer.

    B is zero at the start, so that the network is the pretrained one bit for bit; A and the mixer
    are drawn from `seed`, as PyTorch draws a linear map. Raises ValueError for roles that no layer
    has, and where there is no room for the rank.
    """
    known = dict(_roles(module, head))
    if missing := [role for role in layers if not any(role in roles for roles in known.values())]:
        there = sorted({role for roles in known.values() for role in roles}) or ["none"]
        raise ValueError(
            f"adapter.layers: the network has no {missing[0]}; it has {', '.join(there)}"
        )
    _freeze(module, head, lambda name: False)
    generator = Generator().manual_seed(seed)
    for name, roles in known.items():
        chosen = tuple(place for place, role in enumerate(roles) if role in layers)
        if chosen:
            _widen(
                module.get_submodule(name),
                name,
                rank,
                alpha / rank,
                chosen,
                len(roles),
                pairs,
                generator,
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


def _roles(module: nn.Module, head: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Give layers with the roles of their blocks of rows."""
    for name, layer in module.named_modules():
        parent, _, own = name.rpartition(".")
        holder = module.get_submodule(parent)
        if name == head or not isinstance(layer, nn.Linear | nn.Conv2d):
            continue
        if isinstance(layer, nn.Conv2d):
            if layer.groups == 1:
                yield name, ("conv",)
        elif own == "qkv":
            yield name, PACKED
        elif hasattr(holder, "qkv"):
            yield name, ("proj",)
        else:
            yield name, ("mlp" if "mlp" in name.lower() else "linear",)


def _widen(
    layer: nn.Module,
    name: str,
    rank: int,
    scale: float,
    chosen: tuple[int, ...],
    parts: int,
    pairs: int,
    generator: Generator,
) -> None:
    """Give a layer its low-rank additions."""
    weight: Any = layer.weight
    rows, inputs = len(weight) // parts, weight[0].numel()
    if rank > min(rows, inputs):
        raise ValueError(
            f"adapter.rank={rank} is more than {name} has room for, {min(rows, inputs)}"
        )

    convolution = isinstance(layer, nn.Conv2d)

    def drawn(count: int) -> nn.Parameter:
        shape = (count, *weight.shape[1:]) if convolution else (len(chosen), count, inputs)
        return nn.Parameter(
            torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
        )

    values: dict[str, Any] = {"pairs": pairs, "scale": scale, "chosen": chosen, "parts": parts}
    for pair in range(pairs):
        values[f"lora_A{pair or ''}"] = drawn(rank)
        zeros = torch.zeros((rows, rank, 1, 1) if convolution else (len(chosen), rows, rank))
        values[f"lora_B{pair or ''}"] = nn.Parameter(zeros)
    if pairs > 1:
        values["lora_mixer"] = drawn(pairs)
    layer.__class__ = LoRAConv2d if convolution else LoRALinear
    for key, value in values.items():
        setattr(layer, key, value)
