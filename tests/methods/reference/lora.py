"""Methods over low-rank adapters as plain loops over clients, on layers whose matrices are written
out.

Sources: arXiv:2410.01463 (FedSA-LoRA), arXiv:2403.12313 (FFA-LoRA), arXiv:2503.11880 (FedALT),
arXiv:2601.11219 (SDFLoRA, as far as it could be read).
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference.plain import Result, Setting, Weights, average, hits, train


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
        low = [self._matrix(f"lora_B{name[6:]}") @ (self._matrix(name) @ columns) for name in names]
        if len(names) > 1:
            votes = (self._matrix("lora_mixer") @ columns).exp()
            low = [
                own * votes[:, [place]] / votes.sum(1, keepdim=True)
                for place, own in enumerate(low)
            ]
        y = y + self.scale * sum(low)
        height = x.shape[-1] - self.side + 1
        return y.unflatten(-1, (height, height)) if self.side else y.squeeze(-1)

    def _matrix(self, name: str) -> Tensor:
        value = getattr(self, name)
        return value.flatten(1) if self.side else value[0]


class Adapted(nn.Module):
    """The package's Tiny network with low-rank additions to all but the head."""

    def __init__(self, values: Weights, scale: float):
        super().__init__()

        def of(layer):
            return {k.partition(".")[2]: v for k, v in values.items() if k.startswith(f"{layer}.")}

        self.conv, self.fc = Layer(of("conv"), scale, side=3), Layer(of("fc"), scale)
        self.classifier = nn.Linear(12, 5)
        self.classifier.load_state_dict(of("classifier"))

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(torch.tanh(self.conv(x)), 2)
        return self.classifier(torch.tanh(self.fc(x.flatten(1))))


def trains(name: str) -> bool:
    return "lora_" in name or name.startswith("classifier")


def by_name(
    s: Setting, personal: Callable[[str], bool], moving: Callable[[str], bool] = trains
) -> Result:
    """FedSA-LoRA by what is personal; FFA-LoRA by what moves."""
    result, shared = Result(), s.initial
    own = [{k: v for k, v in s.initial.items() if personal(k)} for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, shared | own[i], i) for i in cohort])
        trained = [train(s, shared | own[i], t, i, moving=moving) for i in cohort]
        result.after.append([hits(s, w, i) for i, w in zip(cohort, trained, strict=True)])
        for i, w in zip(cohort, trained, strict=True):
            own[i] = {k: w[k] for k in own[i]}
        shared = average(s, cohort, trained)
        result.shared.append(shared)
        result.personal.append([shared | mine for mine in own])
    return result


def fedalt(s: Setting, drawn: Callable[[int, int], Weights] | None = None) -> Result:
    """drawn: the A's with which a client begins in the round of its first participation, by round
    and client.
    """
    result, own = Result(), [s.initial for _ in s.clients]
    uploads: dict[int, Weights] = {}

    def mixture(i: int) -> Weights:
        others = [upload for j, upload in uploads.items() if j != i]
        rest = {}
        for name in own[i]:
            if name.endswith(("lora_A1", "lora_B1")):
                mine = name[:-1]
                rest[name] = torch.zeros_like(own[i][name])
                for upload in others:
                    rest[name] = rest[name] + upload[mine] / len(others)
        return own[i] | rest

    for t, cohort in enumerate(s.cohorts, 1):
        starts = {}
        for i in cohort:
            if drawn and i not in uploads:
                own[i] = own[i] | drawn(t, i)
            starts[i] = mixture(i)
        result.before.append([hits(s, starts[i], i) for i in cohort])
        for i in cohort:
            own[i] = train(s, starts[i], t, i, moving=lambda k: trains(k) and not k.endswith("1"))
        result.after.append([hits(s, own[i], i) for i in cohort])
        uploads |= {
            i: {k: own[i][k] for k in own[i] if k.endswith(("lora_A", "lora_B"))} for i in cohort
        }
        result.personal.append([mixture(i) for i in range(len(s.clients))])
    return result


def sdflora(s: Setting, rank: int, stacked: bool, personal_head: bool) -> Result:
    """rank: of the shared module, which is the first rows of A and the first columns of B."""
    result, layers = Result(), ("conv", "fc")

    def cut(name: str, value: Tensor) -> tuple[Tensor, Tensor]:
        axis = {"conv.lora_A": 0, "conv.lora_B": 1, "fc.lora_A": 1, "fc.lora_B": 2}[name]
        return value.narrow(axis, 0, rank), value.narrow(axis, rank, value.shape[axis] - rank)

    def joined(name: str, shared: Tensor, own: Tensor) -> Tensor:
        return torch.cat(
            [shared, own],
            {"conv.lora_A": 0, "conv.lora_B": 1, "fc.lora_A": 1, "fc.lora_B": 2}[name],
        )

    pairs = [f"{layer}.lora_{factor}" for layer in layers for factor in "AB"]
    heads = [k for k in s.initial if k.startswith("classifier") and personal_head]
    shared = s.initial | {name: cut(name, s.initial[name])[0] for name in pairs}
    private = {name: cut(name, s.initial[name])[1] for name in pairs} | {
        k: s.initial[k] for k in heads
    }
    own = [private for _ in s.clients]

    def model(i: int) -> Weights:
        both = {name: joined(name, shared[name], own[i][name]) for name in pairs}
        return shared | {k: own[i][k] for k in heads} | both

    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, model(i), i) for i in cohort])
        trained = [train(s, model(i), t, i, moving=trains) for i in cohort]
        result.after.append([hits(s, w, i) for i, w in zip(cohort, trained, strict=True)])
        for i, w in zip(cohort, trained, strict=True):
            own[i] = {name: cut(name, w[name])[1] for name in pairs} | {k: w[k] for k in heads}
        sent = [w | {name: cut(name, w[name])[0] for name in pairs} for w in trained]
        shared = average(s, cohort, sent)
        total = sum(len(s.clients[i].y) for i in cohort)
        for layer in layers if stacked else ():
            a, b = f"{layer}.lora_A", f"{layer}.lora_B"
            matrix = lambda value: value.double().reshape(-1, *value.shape[-2:])[0].numpy()  # noqa: E731
            product = 0.0
            for i, w in zip(cohort, sent, strict=True):
                left = w[b].flatten(1).double().numpy() if layer == "conv" else matrix(w[b])
                right = w[a].flatten(1).double().numpy() if layer == "conv" else matrix(w[a])
                product = product + len(s.clients[i].y) / total * left @ right
            u, values, v = np.linalg.svd(product)
            for k in range(rank):
                sign = np.sign(v[k][np.abs(v[k]).argmax()])
                u[:, k], v[k] = sign * u[:, k], sign * v[k]
            shared[a] = torch.from_numpy(v[:rank]).float().reshape(shared[a].shape)
            shared[b] = (
                torch.from_numpy(u[:, :rank] * values[:rank]).float().reshape(shared[b].shape)
            )
        result.shared.append(shared)
        result.personal.append([model(i) for i in range(len(s.clients))])
    return result
