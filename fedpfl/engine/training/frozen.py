"""Phases in which the head alone trains: what the body makes of a sample is computed once.

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

from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch, Data
from fedpfl.models import Bound, Net

ROLE = "main"


class FrozenBody:
    """Hold a body that does not move, and what its head reads of samples.

    Args:
        net: The network.
        params: The trained tree, of which the body's leaves hold still.
        buffers: Those that the phase begins with, by role.
        data: All samples of the client.
    """

    def __init__(self, net: Net, params: Tree, buffers: dict[str, Tree], data: Data):
        self._net = net
        self._prefix = f"{net.parts.head_layer}."
        self._params = params
        self._body = [name for name in params if name not in net.parts.head]
        self._buffers = buffers
        self._data = data
        self._features: dict[bool, Tensor | None] = {}

    def bind_batch(self, bound: Bound, batch: Batch) -> FrozenBound:
        """Return the network for a step on a minibatch."""
        return FrozenBound(bound, self, batch)

    def compute_logits(self, bound: Bound, batch: Batch, params: Tree) -> Tensor | None:
        """Return a minibatch's logits by the head alone, None where that is not all."""
        moves_statistics = bool(bound.buffers.get(ROLE)) and bound.training
        if moves_statistics or bound.buffers is not self._buffers:
            return None
        # By identity: a method may put other values in the body's place, as a second model of its
        # own.
        if any(params.get(name) is not self._params[name] for name in self._body):
            return None
        if bound.training not in self._features:
            self._features[bound.training] = self._compute_features(bound)
        features = self._features[bound.training]
        if features is None:
            return None
        head_params = {}
        for name, leaf in params.items():
            if name.startswith(self._prefix):
                head_params[name.removeprefix(self._prefix)] = leaf
        inputs = features[batch.indices]
        head = self._net.head
        if type(head) is nn.Linear:  # as most are, and a call of it is quicker
            return F.linear(inputs, head_params["weight"], head_params.get("bias"))
        return functional_call(head, head_params, (inputs,))

    def _compute_features(self, bound: Bound) -> Tensor | None:
        """Return the head's inputs for all samples, None where it is not the last layer."""
        calls: list[tuple[Tensor, Tensor]] = []

        def record_call(_: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            calls.append((inputs[0], output.float()))

        hook = self._net.head.register_forward_hook(record_call)
        plain_bound = self._net.bind(bound.buffers, bound.training)
        features = []
        try:
            with torch.no_grad():
                for batch in self._data.chunks():
                    calls.clear()
                    logits = plain_bound(self._params, batch.x)
                    # What stands behind the head, a scaling say, would be left out.
                    is_last = len(calls) == 1 and torch.equal(calls[0][1], logits)
                    if not is_last:
                        return None
                    features.append(calls[0][0])
        finally:
            hook.remove()
        return torch.cat(features)


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

    def still(self, buffers: dict[str, Tree] | None = None) -> Bound:
        """Return the same in evaluation mode; see Bound."""
        bound = super().still(buffers)
        return FrozenBound(bound, self._frozen_body, self._batch)

    def __call__(self, params: Tree, x: Tensor, role: str = ROLE) -> Tensor:
        """Return logits `[batch, classes]`; see Bound."""
        if x is self._batch.x and role == ROLE:
            logits = self._frozen_body.compute_logits(self, self._batch, params)
            if logits is not None:
                return logits.float()
        return super().__call__(params, x, role)

    def features(self, params: Tree, x: Tensor, role: str = ROLE) -> tuple[Tensor, Tensor]:
        """Return logits and the head's input, of the whole network; see Bound."""
        bound = self.net.bind(self.buffers, self.training, self.weight)
        answer = bound.features(params, x, role)
        self.buffers = bound.buffers
        return answer


def find_frozen_body(
    net: Net, params: Tree, trainable: Sequence[int], buffers: dict[str, Tree], data: Data
) -> FrozenBody | None:
    """Return the body that holds still while the leaves `trainable` move, if it does.

    Args:
        net: The network.
        params: The trained tree.
        trainable: The leaves that move, by position.
        buffers: By role.
        data: All samples of the client, as steps see them.
    """
    if not isinstance(params, dict) or params.keys() != net.params.keys() or net.parts.unclear:
        return None
    # What draws or mixes samples makes something else of a sample each time.
    if not net.traits.trusted or net.traits.draws:
        return None
    names = list(params)
    prefix = f"{net.parts.head_layer}."
    moving_names = [names[index] for index in trainable]
    is_head_alone = all(name in net.parts.head and name.startswith(prefix) for name in moving_names)
    if not moving_names or not is_head_alone:
        return None
    return FrozenBody(net, params, buffers, data)
