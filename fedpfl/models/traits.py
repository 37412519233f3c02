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
from torch.func import functional_call

from fedpfl.ground.errors import error_text
from fedpfl.ground.seeding import seeded_process
from fedpfl.models.shapes import sample_kind

SEED = 20_261_125  # of the made-up samples and of what is drawn in the calls


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
        changes_input: Whether a call changes its samples in place.
        moves_in_evaluation: Whether buffers change in evaluation mode too.
        crosses_samples: Whether logits in evaluation depend on which samples stand side by side, as
            of what is drawn for them.
        activation: "softmax" or "sigmoid" where the answers are probabilities, else "".
        trusted: Whether the network is one of this package's, of which all this is known and
            tested.
    """

    draws: frozenset[str] = frozenset()
    recomputes: bool = False
    moving: frozenset[str] = frozenset()
    constant: frozenset[str] = frozenset()
    changes_input: bool = False
    moves_in_evaluation: bool = False
    crosses_samples: bool = False
    activation: str = ""
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
    """Call copies of a network on made-up samples, and return its side effects.

    Raises:
        ValueError: In words about the network, for what no run could keep apart between clients.
    """
    # First, as observations compare parameters by their names.
    _require_stable_parameters(module, shape)
    _require_plain_gradients(module)
    training = _Observation(module, made_up_samples(shape, 3), training=True)
    evaluation = _Observation(module, made_up_samples(shape, 3), training=False)
    _require_stable_buffers(module, training)
    _require_no_hidden_state(module, shape)
    _require_values_from_layers(module, shape)

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
        constant=frozenset(training.buffers)
        - training.written_buffers
        - evaluation.written_buffers,
        changes_input=training.changes_input or evaluation.changes_input,
        moves_in_evaluation=bool(evaluation.changed_buffers | evaluation.changed_parameters),
        crosses_samples=bool(evaluation.draws) or _crosses_samples(module, shape),
        activation=_find_activation(evaluation.logits),
        trusted=False,
    )


class _Observation:
    """One forward and backward pass of a copy of a network, and what it changed."""

    def __init__(self, module: nn.Module, x: Tensor, training: bool):
        self.module = copy_network(module).train(training)
        parameters = {name: leaf.detach().clone() for name, leaf in self.module.named_parameters()}
        live_buffers = dict(self.module.named_buffers())
        versions = {name: leaf._version for name, leaf in live_buffers.items()}
        buffers = {name: leaf.clone() for name, leaf in live_buffers.items()}
        samples = x.clone()

        with seeded_process(SEED) as drawn_from:
            logits = self.module(samples)
            if training:
                _backward(logits)
                _require_dense_gradients(self.module)
            self.draws = drawn_from()

        self.logits = logits.detach()
        self.changes_input = not torch.equal(samples, x)
        self.buffers = dict(self.module.named_buffers())
        self.changed_buffers = {
            name for name, old in buffers.items() if differs(old, self.buffers.get(name))
        }
        # A call may write the same values again, or write where torch keeps no count.
        self.written_buffers = self.changed_buffers | {
            name
            for name, leaf in live_buffers.items()
            if self.buffers.get(name) is not leaf or leaf._version != versions[name]
        }
        parameters_after = dict(self.module.named_parameters())
        self.changed_parameters = {
            name for name, old in parameters.items() if differs(old, parameters_after.get(name))
        }

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of all parameters, in order."""
        return [leaf.grad for leaf in self.module.parameters()]


def _find_activation(logits: Tensor) -> str:
    """Return which activation makes probabilities of the answers `[samples, classes]`, or ""."""
    if logits.shape[1] < 2 or not ((logits >= 0) & (logits <= 1)).all():
        return ""
    sums = logits.float().sum(1)
    # A constant answer is none of an activation.
    is_constant = torch.equal(logits, logits[:1].expand_as(logits))
    if torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
        return "softmax"
    return "" if is_constant else "sigmoid"


def copy_network(module: nn.Module) -> nn.Module:
    """Return a deep copy of a network; raise ValueError where it has none."""
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise ValueError(
            f"cannot be copied, as each worker needs its own ({error_text(error, with_class=True)})"
        ) from None


def _recomputes(module: nn.Module, x: Tensor, observed: _Observation) -> bool:
    """Return whether the backward pass reads parameters again.

    It then gives other gradients with other parameters in their place.
    """
    network = copy_network(module).train()
    parameters = list(network.parameters())
    with seeded_process(SEED):
        logits = network(x.clone())
        # Between forward and backward pass: only what is read again meets the other values.
        for layer in network.modules():
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
    # A function of all logits whose gradient is zero in none of them.
    logits.float().logsumexp(1).sum().backward()


def _require_dense_gradients(module: nn.Module) -> None:
    """Raise ValueError for a layer whose gradient is sparse, which no step here takes."""
    for name, leaf in module.named_parameters():
        if leaf.grad is not None and leaf.grad.layout != torch.strided:
            raise ValueError(f"the gradient of {name} is sparse; make its layer with sparse=False")


def differs(before: Tensor, after: Tensor | None) -> bool:
    """Return whether a tensor has another form or other values than before."""
    if after is None or before.shape != after.shape or before.dtype != after.dtype:
        return True
    return not torch.equal(before.nan_to_num(), after.detach().nan_to_num())


def _nearly_equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return torch.allclose(
        a.detach(),
        b.detach(),
        rtol=1e-5,
        atol=1e-6,
        equal_nan=True,
    )


def _require_stable_parameters(module: nn.Module, shape: tuple[int, ...]) -> None:
    """Raise ValueError where parameters or layers come or go in a forward pass."""
    called = copy_network(module).train()
    with seeded_process(SEED), torch.no_grad():
        called(made_up_samples(shape, 3))
    before, after = (
        list(dict(net.named_parameters(remove_duplicate=False))) for net in (module, called)
    )
    for name in sorted({*before} ^ {*after}):
        raise ValueError(
            f"parameter {name} comes or goes in forward; make it in __init__, or a lazy layer of "
            "torch's"
        )


def _require_plain_gradients(module: nn.Module) -> None:
    """Raise ValueError where a parameter has a hook, which copies of the network have not."""
    for name, leaf in module.named_parameters():
        if leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"a hook on the gradient of {name} (register_hook) would not be called; make it a "
                "parametrization (torch.nn.utils.parametrize)"
            )


def _require_values_from_layers(module: nn.Module, shape: tuple[int, ...]) -> None:
    """Raise ValueError where forward does not see a parameter that is put into its layer."""
    changed = copy_network(module).train()
    replaced = copy_network(module).train()
    with seeded_process(SEED), torch.no_grad():
        values: dict[str, Tensor] = {}
        for name, leaf in changed.named_parameters():
            if leaf.requires_grad:
                values[name] = leaf.mul_(1.5).add_(0.1)
        answer = changed(made_up_samples(shape, 3))
    with seeded_process(SEED), torch.no_grad():
        other_answer = functional_call(replaced, values, (made_up_samples(shape, 3),))
    if not _equal(answer, other_answer):
        raise ValueError(
            "forward reads a parameter from a list or an attribute beside its layer, where clients'"
            " values are put; read it from the layer"
        )


def _crosses_samples(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether two samples have other logits where there are more, in evaluation."""
    samples = made_up_samples(shape, 4)
    answers = []
    for count in (4, 2):
        network = copy_network(module).eval()
        with seeded_process(SEED), torch.no_grad():
            answers.append(network(samples[:count].clone())[:2])
    of_four, of_two = answers
    # Products of other sizes round in another way.
    tolerance = 1e-5 * (1 + float(of_two.abs().max()))
    return not torch.allclose(of_four, of_two, rtol=1e-3, atol=tolerance, equal_nan=True)


def require_true_copy(module: nn.Module, built_alike: nn.Module, shape: tuple[int, ...]) -> None:
    """Raise ValueError where a copy of a network computes something else.

    A hook or function that was made in __init__ and refers to the network by a closure still means
    the original one.
    """
    copies = copy_network(module).eval(), built_alike.eval()
    for seed in (SEED, SEED + 1):  # what the first call left behind may show in the second
        results = []
        for net in copies:
            with seeded_process(SEED), torch.no_grad():
                try:
                    results.append(net(made_up_samples(shape, 2, seed)))
                except Exception as error:
                    results.append(error_text(error, with_class=True))
        if not _equal(results[0], results[1]):
            raise ValueError(
                "a copy of it computes something else, and each worker needs one: a hook or "
                "function made in __init__ refers to the network it was made in (use a method of "
                "the network in its place), or calls change something in the module or on the class"
            )


def _require_stable_buffers(module: nn.Module, observed: _Observation) -> None:
    """Raise ValueError where a forward pass adds, removes or reshapes a buffer."""
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
    # ---- Step 1: calls of a copy, and one of a copy that nobody has called.
    used = copy_network(module).train()
    fresh = copy_network(module).train()
    first = made_up_samples(shape, 3)
    second = made_up_samples(shape, 4, SEED + 1)

    attributes = []
    # Twice on each: what differs between equal calls outlives them; then on others, as against a
    # fresh copy, which draws other numbers in its first call.
    for x, seed in ((first, SEED + 1), (first, SEED + 1), (second, SEED), (second, SEED)):
        _restore(used, module)
        with seeded_process(seed), torch.no_grad():
            answer = used(x.clone())
        attributes.append(dict(_attributes(used)))
    with seeded_process(SEED), torch.no_grad():
        expected = fresh(second.clone())

    # ---- Step 2: is anything left of a call?
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
    "forward changes {name}, which outlives the call and would pass from one client to the next; "
    "make it a buffer "
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
    """Yield values that modules keep beside parameters, buffers and layers, by name."""
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
    """Return a value in a form that can be compared.

    Numbers, texts, tensors, states of generators and what holds them are compared; of anything else
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


def _equal(a: Any, b: Any) -> bool:
    """Return whether two comparable values are equal; nan is equal to nan."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _nearly_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    # nan alone differs from itself.
    return type(a) is type(b) and (a == b or (a != a and b != b))


def require_equal_builds(a: nn.Module, b: nn.Module) -> None:
    """Raise ValueError where two networks that were built from one seed differ."""
    values = [{**dict(net.named_parameters()), **dict(net.named_buffers())} for net in (a, b)]
    for name, value in values[0].items():
        if name not in values[1] or differs(value.detach(), values[1][name]):
            raise ValueError(_UNSEEDED.format(name=name))
    attributes = [dict(_attributes(net)) for net in (a, b)]
    for name in attributes[0].keys() | attributes[1].keys():
        if not _equal(attributes[0].get(name), attributes[1].get(name)):
            raise ValueError(_UNSEEDED.format(name=name))


_UNSEEDED = (
    "{name} is another one each time the network is built from one seed; draw from torch's, "
    "NumPy's or Python's "
    "global generator, which `seed` drives"
)
