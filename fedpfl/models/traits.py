"""Side effects of a user's network, found by calling copies of it before the first round.

A network is kept as a pure function of its parameters and buffers. The engine must know what else a
call reads, draws or moves, to choose how it computes; whether the network then trains as in plain
PyTorch is a promise (`testing/network_promises.py`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedpfl.ground.errors import error_text
from fedpfl.ground.seeding import seeded_process
from fedpfl.models.shapes import sample_kind

SEED = 20_261_125
"""Of random samples, and of draws in these calls."""


@dataclass(frozen=True)
class Traits:
    """Side effects of a network's calls.

    Attributes:
        draws: The generators of the process that it draws from (torch, numpy, random), in training
            or evaluation.
        recomputes: Whether layers are called again in the backward pass (activation checkpointing).
        moving: Frozen parameters that a call changes by hand, such as averages: they are kept like
            buffers.
        constant: Buffers that no call writes to, such as masks and encodings of positions: they are
            kept like frozen parameters.
        crosses_samples: Whether logits in evaluation depend on the samples beside them, or on draws.
        trusted: Whether the network is one of this package's, which tests prove free of all this.
    """

    draws: frozenset[str] = frozenset()
    recomputes: bool = False
    moving: frozenset[str] = frozenset()
    constant: frozenset[str] = frozenset()
    crosses_samples: bool = False
    trusted: bool = True


def made_up_samples(shape: tuple[int, ...], count: int, seed: int = SEED) -> Tensor:
    """Draw samples `[count, *shape]`: normal numbers, or the token ids 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    if sample_kind(shape) == "token ids":
        return torch.randint(
            2,
            (count, *shape),
            generator=generator,
            dtype=torch.int32,
        )
    return torch.randn((count, *shape), generator=generator)


def observe(module: nn.Module, shape: tuple[int, ...]) -> Traits:
    """Call copies of a network on random samples, and return its side effects.

    Raises:
        ValueError: It cannot be trained, or changes a parameter by hand.
    """
    x = made_up_samples(shape, 3)
    training = _Observation(module, x, training=True)
    evaluation = _Observation(module, x, training=False)
    changed = training.changed_parameters | evaluation.changed_parameters
    trained = {name for name, leaf in module.named_parameters() if leaf.requires_grad}
    # The value is one for several clients, so a change in place would reach them all.
    if wrong := sorted(changed & trained):
        raise ValueError(
            f"forward changes {wrong[0]}, which is trained, by hand; make it a parametrization "
            "(torch.nn.utils.parametrize), or a buffer"
        )
    return Traits(
        draws=frozenset(training.draws) | frozenset(evaluation.draws),
        recomputes=training.recomputes,
        moving=frozenset(changed),
        constant=training.untouched_buffers & evaluation.untouched_buffers,
        crosses_samples=bool(evaluation.draws) or _crosses_samples(module, x, evaluation.logits),
        trusted=False,
    )


class _Observation:
    """One forward and backward pass of a copy of a network, and its changes."""

    def __init__(self, module: nn.Module, x: Tensor, training: bool):
        # ---- Step 1: values before the call.
        network = copy_network(module).train(training)
        parameters = {name: leaf.detach().clone() for name, leaf in network.named_parameters()}
        live_buffers = dict(network.named_buffers())
        versions = {name: leaf._version for name, leaf in live_buffers.items()}
        buffers = {name: leaf.clone() for name, leaf in live_buffers.items()}

        # ---- Step 2: the call. Activation checkpointing calls layers in the backward pass again.
        calls: list[nn.Module] = []
        for layer in network.modules():
            layer.register_forward_pre_hook(lambda layer, _: calls.append(layer))
        with seeded_process(SEED) as drawn_from:
            logits = network(x.clone())
            calls.clear()
            if training:
                _backward(network, logits)
            self.draws = drawn_from()
        self.recomputes = bool(calls)
        self.logits = logits.detach()

        # ---- Step 3: changes. A call may write the same values again, or write where torch keeps
        # no count.
        buffers_after = dict(network.named_buffers())
        self.untouched_buffers = frozenset(
            name
            for name, leaf in live_buffers.items()
            if buffers_after.get(name) is leaf
            and leaf._version == versions[name]
            and not differs(buffers[name], leaf)
        )
        parameters_after = dict(network.named_parameters())
        self.changed_parameters = {
            name for name, old in parameters.items() if differs(old, parameters_after.get(name))
        }


def copy_network(module: nn.Module) -> nn.Module:
    """Return a deep copy of a network; raise ValueError where it has none."""
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise ValueError(
            f"cannot be copied, as each worker needs its own ({error_text(error, with_class=True)})"
        ) from None


def _backward(network: nn.Module, logits: Tensor) -> None:
    """Differentiate the logits. Raises ValueError where that gives no dense gradients."""
    if not logits.requires_grad:
        raise ValueError(
            "its logits have no gradient: forward must not detach them, or run under torch.no_grad"
        )
    # A function of all logits with gradients that are zero nowhere.
    logits.float().logsumexp(1).sum().backward()
    if any(leaf.grad is not None and leaf.grad.is_sparse for leaf in network.parameters()):
        raise ValueError("its gradients are sparse; make its layers with sparse=False")


def differs(before: Tensor, after: Tensor | None) -> bool:
    """Check whether a tensor has another form or other values than before."""
    if after is None or before.shape != after.shape or before.dtype != after.dtype:
        return True
    return not torch.equal(before.nan_to_num(), after.detach().nan_to_num())


def _crosses_samples(module: nn.Module, x: Tensor, logits: Tensor) -> bool:
    """Check whether two samples have other logits alone than beside a third, in evaluation."""
    network = copy_network(module).eval()
    with seeded_process(SEED), torch.no_grad():
        alone = network(x[:2].clone())
    # Products of other sizes round in another way.
    tolerance = 1e-5 * (1 + float(alone.abs().max()))
    return not torch.allclose(logits[:2], alone, rtol=1e-3, atol=tolerance, equal_nan=True)
