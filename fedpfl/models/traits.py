"""What a network does when it is called, found out by calling it before the first round.

A network is kept as a pure function of its parameters and buffers. What else it changes or draws
shows in a few calls on made-up samples: some of it is taken over (a frozen parameter that moves
becomes a buffer), the rest is refused in one line, since it would leak from one client to the next.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedpfl.ground.errors import error_text
from fedpfl.ground.seeding import seeded_process
from fedpfl.models.shapes import sample_kind

SEED = 20_261_125  # of the made-up samples and of what is drawn in the calls


@dataclass(frozen=True)
class Traits:
    """Hold what calls of a network showed.

    draws: the generators of the process that it draws from (torch, numpy, random), in training or
    evaluation.
    recomputes: whether layers are called again in the backward pass (activation checkpointing).
    moving: frozen parameters that a call changes by hand, such as averages: they are kept like
    buffers.
    changes_input: whether a call changes its samples in place.
    moves_in_evaluation: whether buffers change in evaluation mode too.
    trusted: whether the network is one of this package's, of which all this is known and tested.
    """

    draws: frozenset[str] = frozenset()
    recomputes: bool = False
    moving: frozenset[str] = frozenset()
    changes_input: bool = False
    moves_in_evaluation: bool = False
    trusted: bool = True


def made_up_samples(shape: tuple[int, ...], count: int, seed: int = SEED) -> Tensor:
    """Return samples `[count, *shape]` to try a network on: normal numbers, or the token ids 0 and
    1.
    """
    generator = torch.Generator().manual_seed(seed)
    if sample_kind(shape) == "token ids":
        return torch.randint(2, (count, *shape), generator=generator, dtype=torch.int32)
    return torch.randn(count, *shape, generator=generator)


def observe(module: nn.Module, shape: tuple[int, ...]) -> Traits:
    """Call copies of a network on made-up samples of `shape`; return what shows.

    Raises ValueError, in words about the network, for what no run could keep apart between clients.
    """
    _require_stable_parameters(module, shape)
    training = _Observation(module, made_up_samples(shape, 3), training=True)
    evaluation = _Observation(module, made_up_samples(shape, 3), training=False)
    _require_stable_buffers(module, training)
    _require_no_hidden_state(module, shape)

    # ---- what calls change by hand
    trained = {name for name, leaf in module.named_parameters() if leaf.requires_grad}
    changed = training.changed_parameters | evaluation.changed_parameters
    if wrong := sorted(changed & trained):
        raise ValueError(
            f"forward changes {wrong[0]}, which is trained, by hand; make it a parametrization "
            "(torch.nn.utils.parametrize), or a buffer"
        )
    return Traits(
        draws=frozenset(training.draws) | frozenset(evaluation.draws),
        recomputes=_recomputes(module, made_up_samples(shape, 3), training),
        moving=frozenset(changed),
        changes_input=training.changes_input or evaluation.changes_input,
        moves_in_evaluation=bool(evaluation.changed_buffers | evaluation.changed_parameters),
        trusted=False,
    )


class _Observation:
    """One forward and backward pass of a copy of a network, and what it changed."""

    def __init__(self, module: nn.Module, x: Tensor, training: bool):
        self.module = copied(module).train(training)
        parameters = {name: leaf.detach().clone() for name, leaf in self.module.named_parameters()}
        buffers = {name: leaf.clone() for name, leaf in self.module.named_buffers()}
        given = x.clone()

        with seeded_process(SEED) as drawn_from:
            logits = self.module(given)
            if training:
                _backward(logits)
            self.draws = drawn_from()

        self.changes_input = not torch.equal(given, x)
        self.buffers = dict(self.module.named_buffers())
        self.changed_buffers = {
            name for name, old in buffers.items() if _differs(old, self.buffers.get(name))
        }
        now = dict(self.module.named_parameters())
        self.changed_parameters = {
            name for name, old in parameters.items() if _differs(old, now.get(name))
        }

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of all parameters, in order."""
        return [leaf.grad for leaf in self.module.parameters()]


def copied(module: nn.Module) -> nn.Module:
    """Return a deep copy of a network; raise ValueError where it has none."""
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise ValueError(
            f"cannot be copied, as each worker needs its own ({error_text(error, with_class=True)})"
        ) from None


def _recomputes(module: nn.Module, x: Tensor, observed: _Observation) -> bool:
    """Return whether the backward pass reads parameters again: with others in their place it gives
    other gradients.
    """
    used = copied(module).train()
    parameters = list(used.parameters())
    with seeded_process(SEED):
        logits = used(x.clone())
        for layer in used.modules():
            for name, leaf in layer._parameters.items():
                if leaf is not None:
                    layer._parameters[name] = nn.Parameter(
                        1.5 * leaf.detach() + 0.1, leaf.requires_grad
                    )
        try:
            _backward(logits)
        except Exception:
            return True
    expected = observed.gradients()
    return any(
        (leaf.grad is None) != (gradient is None)
        or (gradient is not None and not _equal(leaf.grad, gradient))
        for leaf, gradient in zip(parameters, expected, strict=True)
    )


def _backward(logits: Tensor) -> None:
    """Differentiate the logits; raise ValueError where nothing leads back to the parameters."""
    if not logits.requires_grad:
        raise ValueError(
            "its logits have no gradient: forward must not detach them, or run under torch.no_grad"
        )
    logits.float().logsumexp(1).sum().backward()


def _differs(before: Tensor, after: Tensor | None) -> bool:
    if after is None or before.shape != after.shape or before.dtype != after.dtype:
        return True
    return not torch.equal(before.nan_to_num(), after.detach().nan_to_num())


def _nearly_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    return torch.allclose(one.detach(), other.detach(), rtol=1e-5, atol=1e-6, equal_nan=True)


def _require_stable_parameters(module: nn.Module, shape: tuple[int, ...]) -> None:
    """Raise ValueError where parameters or layers come or go in a forward pass."""
    used = copied(module).train()
    with seeded_process(SEED), torch.no_grad():
        used(made_up_samples(shape, 3))
    before, after = (
        list(dict(net.named_parameters(remove_duplicate=False))) for net in (module, used)
    )
    for name in sorted({*before} ^ {*after}):
        raise ValueError(
            f"parameter {name} comes or goes in forward; make it in __init__, or a lazy layer of torch's"
        )


def require_true_copy(module: nn.Module, built_alike: nn.Module, shape: tuple[int, ...]) -> None:
    """Raise ValueError where a copy of a network does not compute what the network itself does.

    A hook or function that was made in __init__ and refers to the network by a closure still means
    the original one.
    """
    copies = copied(module).eval(), built_alike.eval()
    for seed in (SEED, SEED + 1):  # what the first call left behind may show in the second
        answers = []
        for net in copies:
            with seeded_process(SEED), torch.no_grad():
                try:
                    answers.append(net(made_up_samples(shape, 2, seed)))
                except Exception as error:
                    answers.append(error_text(error, with_class=True))
        if not _equal(*answers):
            raise ValueError(
                "a copy of it computes something else, and each worker needs one: a hook or function made in __init__ "
                "refers to the network it was made in; use a method of the network in its place"
            )


def _require_stable_buffers(module: nn.Module, observed: _Observation) -> None:
    """Raise ValueError where a buffer comes, goes, or changes its shape or dtype in a forward pass."""
    before = dict(module.named_buffers())
    for name in before.keys() ^ observed.buffers.keys():
        raise ValueError(f"buffer {name} comes or goes in forward; give it its form in __init__")
    for name, old in before.items():
        new = observed.buffers[name]
        if old.shape != new.shape or old.dtype != new.dtype:
            forms = [
                f"{leaf.dtype}".removeprefix("torch.") + f" {list(leaf.shape)}"
                for leaf in (old, new)
            ]
            raise ValueError(
                f"buffer {name} is {forms[0]} before forward and {forms[1]} after it; keep its form"
            )


def _require_no_hidden_state(module: nn.Module, shape: tuple[int, ...]) -> None:
    """Raise ValueError where an attribute carries something from one call into the next.

    A clean network gives the same whatever it was called on before. Attributes that are merely
    overwritten (features kept for whoever looks) are the same after the same call, and do no harm.
    """
    used, fresh = copied(module).train(), copied(module).train()
    first, second = made_up_samples(shape, 3), made_up_samples(shape, 4, SEED + 1)

    attributes = []
    for x in (first, first, second, second):
        _restore(used, module)
        with seeded_process(SEED), torch.no_grad():
            answer = used(x.clone())
        attributes.append(dict(_attributes(used)))
    with seeded_process(SEED), torch.no_grad():
        expected = fresh(second.clone())

    for before, after in ((attributes[0], attributes[1]), (attributes[2], attributes[3])):
        for name in before.keys() | after.keys():
            if not _equal(before.get(name), after.get(name)):
                raise ValueError(_HIDDEN.format(name=name))
    if not _equal(answer, expected):
        unlike = dict(_attributes(module))
        names = [
            name for name, value in attributes[0].items() if not _equal(value, unlike.get(name))
        ]
        raise ValueError(_HIDDEN.format(name=names[0] if names else "an attribute"))


_HIDDEN = (
    "forward changes {name}, which outlives the call and would pass from one client to the next; make it a buffer "
    "(register_buffer) with a value from __init__ on"
)


def _restore(used: nn.Module, module: nn.Module) -> None:
    """Give a used copy the parameters and buffers of the network again."""
    for target, source in zip(used.modules(), module.modules(), strict=True):
        for tensors, originals in (
            (target._parameters, source._parameters),
            (target._buffers, source._buffers),
        ):
            for name, value in originals.items():
                if value is not None:
                    tensors[name].data = value.detach().clone()  # type: ignore[union-attr]


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Give the values that modules keep beside parameters, buffers and layers, by name, as far as
    they compare.
    """
    for prefix, layer in module.named_modules():
        for key, value in vars(layer).items():
            if key not in _MACHINERY:
                yield f"{prefix}.{key}".strip("."), copy.deepcopy(_comparable(value))


_MACHINERY = {
    *vars(nn.Module()),
    "_is_full_backward_hook",
    "sample_weight",
}
"""What torch keeps in every module."""


def _comparable(value: Any, depth: int = 3) -> Any:
    """Return numbers, texts, tensors, states of generators and what holds them; of anything else
    its type.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if hasattr(value, "tobytes"):  # NumPy's arrays and numbers
        return [str(value.dtype), list(value.shape), value.tobytes()]
    if hasattr(value, "bit_generator"):
        return repr(value.bit_generator.state)
    if hasattr(value, "get_state"):
        return _comparable(value.get_state())
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, nn.Module) or not depth:
        return type(value).__name__
    if isinstance(value, Mapping):
        return {str(key): _comparable(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_comparable(item, depth - 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if type(value).__module__ == "builtins" or not hasattr(value, "__dict__"):
        return type(value).__name__
    return {key: _comparable(item, depth - 1) for key, item in vars(value).items()}


def _equal(one: Any, other: Any) -> bool:
    """Return whether two comparable values are equal; nan is equal to nan."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _nearly_equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def require_equal_builds(one: nn.Module, other: nn.Module) -> None:
    """Raise ValueError where two networks that were built from one seed differ."""
    values = [{**dict(net.named_parameters()), **dict(net.named_buffers())} for net in (one, other)]
    for name, value in values[0].items():
        if name not in values[1] or _differs(value.detach(), values[1][name]):
            raise ValueError(_UNSEEDED.format(name=name))
    attributes = [dict(_attributes(net)) for net in (one, other)]
    for name in attributes[0].keys() | attributes[1].keys():
        if not _equal(attributes[0].get(name), attributes[1].get(name)):
            raise ValueError(_UNSEEDED.format(name=name))


_UNSEEDED = (
    "{name} is another one each time the network is built from one seed; draw from torch's, NumPy's or Python's "
    "global generator, which `seed` drives"
)
