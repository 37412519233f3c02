"""Personal models as entries by name, and as modules for samples as a data set holds them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import safetensors.torch
import torch
from torch import Tensor, nn

from fedpfl.data import Federation
from fedpfl.engine.keys import generator
from fedpfl.engine.training.shard import normalize_samples
from fedpfl.ground import tree
from fedpfl.ground.records import Record, Values
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import Batch, Method
from fedpfl.models import Net
from fedpfl.models.net import Bound


def make_batch(method: Method, federation: Federation, samples: Tensor) -> Batch:
    """Return samples as `predict` sees them, with the same numbers each time."""
    random = torch.rand(len(samples), method.randoms, generator=generator("predict"))
    position = torch.arange(len(samples), device=samples.device)
    x = normalize_samples(federation, samples)
    return Batch(x, None, None, random.to(samples.device), position)  # type: ignore[arg-type]


def name_entries(
    method: Method, net: Net, params: Tree, buffers: Entries, federation: Federation
) -> dict[str, Tensor]:
    """Return an evaluated model as a `state_dict` of the network, on the CPU.

    Of methods that predict with more than one network all their entries, with dots.
    """
    if params.keys() != net.params.keys():
        return copy_to_cpu(dict(tree.items({**params, "buffers": buffers})))
    # A method says nowhere which role's statistics it predicts with; a call of it does.
    roles: list[str] = []

    class RecordingNet(Bound):
        def __call__(self, params: Tree, x: Tensor, role: str = "main") -> Tensor:
            roles.append(role)
            return super().__call__(params, x, role)

    with torch.no_grad():
        bound = RecordingNet(net, buffers, False, None)
        method.predict(bound, params, make_batch(method, federation, federation.x[:1]))
    statistics = buffers.get(roles[0], {})
    return copy_to_cpu(net.state_dict({**net.fixed, **params, **statistics}))


def describe_input(federation: Federation) -> Record:
    """Return form and scaling of the network's input."""
    described: Record = {
        "kind": federation.shape.kind,
        "shape": list(federation.shape),
        "mean": list(federation.mean),
        "std": list(federation.std),
    }
    if federation.feature_names:
        described["features"] = list(federation.feature_names)
    if federation.fill:
        described["fill"] = list(federation.fill)
    return described


def pack_entries(
    entries: Mapping[str, Tensor], input_facts: Values, classes: Sequence[str]
) -> bytes:
    """Return entries as a safetensors file, with what their input must be in the metadata."""
    facts = {"input": input_facts, "classes": classes}
    return safetensors.torch.save(
        dict(entries), {key: json.dumps(value) for key, value in facts.items()}
    )


def copy_to_cpu(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, each with its own memory."""
    return {
        name: leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, leaf in values.items()
    }


class InputScaling(nn.Module):
    """Fill and scale samples as training did; pixels and features become float32, ids stay.

    Args:
        federation: data that the network was trained on.
    """

    mean: Tensor
    std: Tensor
    fill: Tensor

    def __init__(self, federation: Federation):
        super().__init__()
        self.is_image = federation.x.dtype == torch.uint8
        self.is_scaled = bool(federation.mean)
        self.may_lack_values = bool(federation.fill)
        trailing_axes = [1] * (federation.x.dim() - 2)
        for name in ("mean", "std", "fill"):
            values = torch.tensor(getattr(federation, name), dtype=torch.float32)
            constants = values.view((-1, *trailing_axes))
            # In no state_dict: the network's own entries are all that `personal` has.
            self.register_buffer(name, constants, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Scale samples `[samples, ...]`."""
        if self.may_lack_values:
            x = torch.where(x.isnan(), self.fill, x)
        if not self.is_scaled:
            return x
        values = x.to(torch.float32)
        if self.is_image:
            values = values / 255
        return (values - self.mean) / self.std


class InputScalingHook:
    """Scale the samples of a network's calls, and keep the names of its state_dict."""

    def __init__(self, federation: Federation):
        self._scaling = InputScaling(federation)

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the inputs of a call, the first one scaled."""
        samples, *others = inputs
        scaling = self._scaling.to(samples.device)
        return (scaling(samples), *others)


class PersonalNetwork(nn.Module):
    """A client's network behind the scaling of its input."""

    def __init__(self, scaling: InputScaling, network: nn.Module):
        super().__init__()
        self.scaling = scaling
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[samples, classes]` of samples `[samples, ...]`."""
        return self.network(self.scaling(x)).float()


class PersonalRule(nn.Module):
    """A method's own way to predict, such as a mixture of two networks.

    Args:
        scaling: Of the input.
        method: with the `predict`.
        net: The network.
        params: The client's evaluated model.
        statistics: Of BatchNorm, by the model's role.
    """

    def __init__(
        self,
        scaling: InputScaling,
        method: Method,
        net: Net,
        params: Tree,
        statistics: dict[str, Tree],
    ):
        super().__init__()
        self.scaling = scaling
        self._method = method
        self._net = net
        # Leaves as buffers, so that export formats find them; the template has their form.
        self._template = {"params": params, "statistics": statistics}
        for number, leaf in enumerate(tree.leaves(self._template)):
            self.register_buffer(
                f"value_{number}",
                leaf.detach().cpu().clone(),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[samples, classes]` of samples `[samples, ...]`."""
        values = iter(self.buffers(recurse=False))
        filled = tree.map(lambda _: next(values), self._template)
        bound = self._net.bind(filled["statistics"])
        batch = Batch(self.scaling(x), None)  # type: ignore[arg-type]
        return self._method.predict(bound, filled["params"], batch).float()
