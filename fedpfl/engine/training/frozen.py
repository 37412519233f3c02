"""Phases that train the head alone: the body's output for a sample is computed once.

A step then is the head's. Nothing is asked of methods: which entries hold still shows in a phase's
mask, and which samples a loss looks at in the minibatch. A call that asks for anything else is
computed as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import Batch, Data
from fedpfl.models import Bound, Net

ROLE = "main"
"""The role of the trained network's BatchNorm statistics, which a body uses."""


class FrozenBody:
    """Hold a body that does not move, and what its head reads of samples.

    Args:
        net: The network.
        params: The trained tree; the body's leaves hold still.
        buffers: Those that the phase begins with, by role.
        data: All samples of the client.
        features: The head's inputs of these samples, if known.
    """

    def __init__(
        self,
        net: Net,
        params: Tree,
        buffers: Entries,
        data: Data,
        features: Tensor | None = None,
    ):
        self._net = net
        self._prefix = f"{net.parts.head_layer}."
        self._params = params
        self._body = [name for name in params if name not in net.parts.head]
        self._buffers = buffers
        self._data = data
        self._features = features
        self._is_computed = features is not None

    def bind_batch(self, bound: Bound, batch: Batch) -> FrozenBound:
        """Return the network for a step on a minibatch."""
        return FrozenBound(bound, self, batch)

    def find_inputs(self, bound: Bound, batch: Batch, params: Tree, role: str) -> Tensor | None:
        """Return the head's inputs of a minibatch, None where the body is needed."""
        if bound.buffers.get(role):
            is_still = bound.buffers is self._buffers and not bound.training
            if role != ROLE or not is_still:
                return None
        if not isinstance(params, dict) or params.keys() != self._params.keys():
            return None
        # By identity: a method may put other values in the body's place, as a second model of its
        # own.
        if any(params.get(name) is not self._params[name] for name in self._body):
            return None
        features = self.compute_features(bound)
        return None if features is None else features[batch.indices]

    def compute_features(self, bound: Bound) -> Tensor | None:
        """Return the head's inputs of all samples.

        None where the head is not the last layer.
        """
        if not self._is_computed:
            self._features = compute_features(bound, self._params, self._data)
            self._is_computed = True
        return self._features

    def apply_head(self, params: Tree, inputs: Tensor) -> Tensor:
        """Return the logits of the head's inputs, float32."""
        head_params = {}
        for name, leaf in params.items():
            if name.startswith(self._prefix):
                head_params[name.removeprefix(self._prefix)] = leaf
        head = self._net.head
        if type(head) is nn.Linear:  # as most are, and a call of it is quicker
            return F.linear(inputs, head_params["weight"], head_params.get("bias")).float()
        return functional_call(head, head_params, (inputs,)).float()


class FrozenBound(Bound):
    """Compute the head alone where a minibatch goes through a body that holds still.

    Args:
        bound: The network with its buffers.
        body: What holds still.
        batch: The minibatch.
    """

    def __init__(self, bound: Bound, body: FrozenBody, batch: Batch):
        super().__init__(bound.net, bound.buffers, bound.training, bound.weight)
        self._frozen_body = body
        self._batch = batch

    def still(self, buffers: Entries | None = None) -> Bound:
        """Return the same in evaluation mode; see Bound."""
        bound = super().still(buffers)
        return FrozenBound(bound, self._frozen_body, self._batch)

    def __call__(self, params: Tree, x: Tensor, role: str = ROLE) -> Tensor:
        """Return logits `[batch, classes]`; see Bound."""
        inputs = self._find_inputs(params, x, role)
        if inputs is None:
            return super().__call__(params, x, role)
        return self._frozen_body.apply_head(params, inputs)

    def features(self, params: Tree, x: Tensor, role: str = ROLE) -> tuple[Tensor, Tensor]:
        """Return logits and the head's input; see Bound."""
        inputs = self._find_inputs(params, x, role)
        if inputs is not None and inputs.dim() == 2:
            return self._frozen_body.apply_head(params, inputs), inputs.float()
        bound = self.net.bind(self.buffers, self.training, self.weight)
        answer = bound.features(params, x, role)
        self.buffers = bound.buffers
        return answer

    def _find_inputs(self, params: Tree, x: Tensor, role: str) -> Tensor | None:
        """Return the head's inputs of the minibatch, None for any other samples."""
        if x is not self._batch.x:
            return None
        return self._frozen_body.find_inputs(self, self._batch, params, role)


def find_frozen_body(
    net: Net, params: Tree, trainable: Sequence[int], buffers: Entries, data: Data
) -> FrozenBody | None:
    """Return the body that holds still while the leaves `trainable` move, if it does.

    Args:
        net: The network.
        params: The trained tree.
        trainable: The leaves that move, by position.
        buffers: By role.
        data: All samples of the client, as steps see them.
    """
    if not isinstance(params, dict) or params.keys() != net.params.keys():
        return None
    names = list(params)
    if not is_of_head(net, [names[index] for index in trainable]):
        return None
    return FrozenBody(net, params, buffers, data)


def is_of_head(net: Net, moving_names: Sequence[str]) -> bool:
    """Check that the head has these parameters, and a sample looks always alike."""
    # What draws or mixes samples makes something else of a sample each time.
    if net.parts.unclear or not net.traits.trusted or net.traits.draws or not moving_names:
        return False
    prefix = f"{net.parts.head_layer}."
    return all(name in net.parts.head and name.startswith(prefix) for name in moving_names)


def compute_features(bound: Bound, params: Tree, data: Data) -> Tensor | None:
    """Return the head's inputs for all samples, None where it is not the last layer."""
    calls: list[tuple[Tensor, Tensor]] = []

    def record_call(_: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((inputs[0], output.float()))

    hook = bound.net.head.register_forward_hook(record_call)
    plain_bound = bound.net.bind(bound.buffers, bound.training)
    features = []
    try:
        with torch.no_grad():
            for batch in data.chunks():
                calls.clear()
                logits = plain_bound(params, batch.x)
                # What stands behind the head, a scaling say, would be left out.
                is_last = len(calls) == 1 and torch.equal(calls[0][1], logits)
                if not is_last:
                    return None
                features.append(calls[0][0])
    finally:
        hook.remove()
    return torch.cat(features)
