"""Methods over low-rank adapters, on layers whose matrices are written out.

Sources: arXiv:2410.01463 (FedSA-LoRA), 2403.12313 (FFA-LoRA), 2503.11880 (FedALT), 2601.11219
(SDFLoRA, as far as it could be read).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference import plain
from tests.methods.reference.plain import Result, Setting, Turn, Weights


class Layer(nn.Module):
    """W x + b and the additions, of columns of `x`; a convolution (`side`) unfolds its images into
    such.
    """

    def __init__(self, values: Weights, scale: float, side: int = 0):
        super().__init__()
        self.scale, self.side = scale, side
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(x, self.side) if self.side else x.unsqueeze(-1)
        y = self.weight.flatten(1) @ columns + self.bias[:, None]
        names = [name for name, _ in self.named_parameters() if name.startswith("lora_A")]
        products = [
            self._matrix(f"lora_B{name[6:]}") @ (self._matrix(name) @ columns) for name in names
        ]
        if len(names) > 1:
            votes = (self._matrix("lora_mixer") @ columns).exp()
            shares = [
                votes[:, [place]] / votes.sum(1, keepdim=True) for place in range(len(products))
            ]
            products = [own * share for own, share in zip(products, shares, strict=True)]
        y = y + self.scale * sum(products)
        height = x.shape[-1] - self.side + 1
        return y.unflatten(-1, (height, height)) if self.side else y.squeeze(-1)

    def _matrix(self, name: str) -> Tensor:
        value = getattr(self, name)
        return value.flatten(1) if self.side else value[0]


class Adapted(nn.Module):
    """The package's Tiny network with low-rank additions to all but the head."""

    def __init__(self, values: Weights, scale: float):
        super().__init__()

        def of(layer: str) -> Weights:
            return {k.partition(".")[2]: v for k, v in values.items() if k.startswith(f"{layer}.")}

        self.conv, self.fc = Layer(of("conv"), scale, side=3), Layer(of("fc"), scale)
        self.classifier = nn.Linear(12, 5)
        self.classifier.load_state_dict(of("classifier"))

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(torch.tanh(self.conv(x)), 2)
        return self.classifier(torch.tanh(self.fc(x.flatten(1))))


Choice = Callable[[str], bool]


def is_trained(name: str) -> bool:
    return "lora_" in name or name.startswith("classifier")


def by_name(
    s: Setting, is_own: Choice = lambda name: False, is_moving: Choice = is_trained
) -> Result:
    """FedSA-LoRA by what is a client's own; FFA-LoRA by what moves."""
    return plain.split(s, is_own, lambda w, turn: plain.train(s, w, turn, is_moving=is_moving))


def fedalt(s: Setting, drawn: Callable[[int, int], Weights] | None = None) -> Result:
    """drawn: the A's with which a client begins in the round of its first participation, by round
    and client.
    """
    own, uploads = s.each(s.initial), dict[int, Weights]()

    def mixture(turn: Turn) -> Weights:
        others = [upload for j, upload in uploads.items() if j != turn.i]
        rest_of_world = {}
        for name in own[turn.i]:
            if name.endswith(("lora_A1", "lora_B1")):
                sent = [upload[name[:-1]] for upload in others]
                rest_of_world[name] = sum(sent) / len(sent) if sent else 0 * own[turn.i][name]
        return own[turn.i] | rest_of_world

    def begin(turn: Turn) -> Weights:
        if drawn and turn.i not in uploads:
            own[turn.i] = own[turn.i] | drawn(turn.t, turn.i)
        return mixture(turn)

    def local(w: Weights, turn: Turn) -> Weights:
        is_moving = lambda name: is_trained(name) and not name.endswith("1")  # noqa: E731
        own[turn.i] = plain.train(s, w, turn, is_moving=is_moving)
        return own[turn.i]

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        for i, end in trained.items():
            uploads[i] = plain.pick(end, lambda name: name.endswith(("lora_A", "lora_B")))
        return {}

    return plain.play(s, local, begin, merge, personal=mixture)


AXES = {"conv.lora_A": 0, "conv.lora_B": 1, "fc.lora_A": 1, "fc.lora_B": 2}
"""Along which the rank runs."""


def sdflora(s: Setting) -> Result:
    """Of the two ranks the first, a row of A and a column of B, is shared; heads are clients'."""
    own: dict[int, Weights] = {}

    def cut(weights: Weights, first: int, length: int) -> Weights:
        return {k: weights[k].narrow(axis, first, length) for k, axis in AXES.items()}

    def keep(i: int, weights: Weights) -> None:
        head = plain.pick(weights, lambda name: name.startswith("classifier"))
        own[i] = cut(weights, 1, 1) | head

    def begin(turn: Turn) -> Weights:
        pairs = {k: (turn.shared[k], own[turn.i][k]) for k in AXES}
        both = {k: torch.cat(pair, AXES[k]) for k, pair in pairs.items()}
        return turn.shared | own[turn.i] | both

    def local(w: Weights, turn: Turn) -> Weights:
        end = plain.train(s, w, turn, is_moving=is_trained)
        keep(turn.i, end)
        return end

    def matrix(value: Tensor, layer: str) -> np.ndarray:
        return (value.flatten(1) if layer == "conv" else value[0]).double().numpy()

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        sent = {i: end | cut(end, 0, 1) for i, end in trained.items()}
        new, total = plain.average(s, sent), sum(len(s.clients[i].y) for i in trained)
        for layer in ("conv", "fc"):
            a, b, product = f"{layer}.lora_A", f"{layer}.lora_B", 0.0
            for i, w in sent.items():
                share = len(s.clients[i].y) / total
                product = product + share * matrix(w[b], layer) @ matrix(w[a], layer)
            u, values, v = np.linalg.svd(product)
            sign = np.sign(v[0][np.abs(v[0]).argmax()])
            new[a] = torch.from_numpy(sign * v[0]).float().reshape(new[a].shape)
            new[b] = torch.from_numpy(sign * u[:, 0] * values[0]).float().reshape(new[b].shape)
        return new

    for i in s.everyone:
        keep(i, s.initial)
    shared = s.initial | cut(s.initial, 0, 1)
    return plain.play(s, local, begin, merge, after=lambda i, end: end, shared=shared)
