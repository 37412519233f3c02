"""Rules for answers of hooks, where mistakes would change numbers in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpfl.engine.training.forms import describe_form_change, persistent_entries
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import FACTS, Batch, Method, Phase, Turn

Faults = Iterator[str]


@dataclass
class Expected:
    """Hold the references of checks, as far as they are known.

    Attributes:
        method: The method.
        client: A client's initial state.
        classes: The number of classes.
        checked: The hooks of every step that have answered; their first answer stands for all.
    """

    method: Method
    client: dict[str, Tree] | None = None
    classes: int = 0
    checked: set[str] = field(default_factory=set)

    def default(self, hook: str) -> bool:
        """Check whether a hook is FedAvg's."""
        return getattr(type(self.method), hook) is getattr(Method, hook)


class HookRule(NamedTuple):
    """State a hook's right answer.

    Attributes:
        must: For the message.
        faults: `faults(answer, expected, *arguments)` yields the faults of an answer.
        often: Whether every step calls the hook, and the first answer stands for all.
    """

    must: str
    faults: Callable[..., Faults]
    often: bool = False


def _describe(value: Any) -> str:
    if value is None:
        return "None (is a `return` missing?)"
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}"


def _check_tree(value: Any, *_: Any) -> Faults:
    """Yield leaves that are no tensors."""
    if isinstance(value, tree.Ragged):
        value = value.values
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if not isinstance(value, dict):
        if not isinstance(value, Tensor):
            yield _describe(value)
        return
    for name, part in value.items():
        for fault in _check_tree(part):
            yield f"{fault} in {name!r}"


def _check_dict(value: Any, *_: Any) -> Faults:
    if not isinstance(value, dict):
        yield _describe(value)
    yield from _check_tree(value)


def _check_pair(value: Any, *_: Any) -> Faults:
    """Yield faults of a tree and a client's state."""
    if not isinstance(value, tuple | list) or hasattr(value, "_fields") or len(value) != 2:
        yield _describe(value)
    yield from _check_tree(value[0])
    yield from _check_dict(value[1])


def _check_init(value: Any, *_: Any) -> Faults:
    yield from _check_pair(value)
    for name in FACTS:
        if name in value[1]:
            yield f"a client state with {name!r}, which the engine lays over it: leave it out"


def _check_finish(value: Any, expected: Expected, *_: Any) -> Faults:
    yield from _check_pair(value)
    if expected.client is not None and (
        change := describe_form_change(
            persistent_entries(value[1], expected.client), expected.client
        )
    ):
        yield f"a client state in another form than init's, {change}"


def _check_aggregate(value: Any, expected: Expected, *arguments: Any) -> Faults:
    yield from _check_pair(value)
    cohort = len(arguments[4])
    for name, leaf in tree.items(value[1]):
        if leaf.dim() == 0 or len(leaf) != cohort:
            yield f"the clients' {name} as {_describe(leaf)} for a cohort of {cohort}"


def _check_turns(value: Any, expected: Expected, *_: Any) -> Faults:
    if not isinstance(value, list) or not all(isinstance(turn, Turn) for turn in value):
        yield _describe(value)
    trained = [number for turn in value if not turn.survey for number in turn.clients]
    if not trained:
        yield "no turn in which clients train"
    for numbers in (trained, *(turn.clients for turn in value)):
        if len(numbers) != len(set(numbers)):
            yield f"a client twice, of {sorted(numbers)}"


def _check_phases(value: Any, expected: Expected, *arguments: Any) -> Faults:
    if not isinstance(value, list):
        yield _describe(value)
    for phase in value:
        if not isinstance(phase, Phase):
            yield f"a list with {_describe(phase)} in it"
        for name, least in (("epochs", 0), ("batches", 1)):
            count = getattr(phase, name)
            if not isinstance(count, Integral) or count < least:
                yield f"a phase of {count!r} {name}"
        # Numbers would scale gradients.
        for name, leaf in tree.items({} if phase.mask is None else phase.mask):
            if not isinstance(leaf, bool) and getattr(leaf, "dtype", None) != torch.bool:
                yield f"a phase whose mask has {_describe(leaf)} for {name or 'all'}"


def _check_gradient(value: Any, params: Tree) -> Faults:
    """Yield a fault for training without a gradient, silent on the batched backend."""
    is_asked = any(leaf.requires_grad for leaf in tree.leaves(params))
    if torch.is_grad_enabled() and is_asked and not value.requires_grad:
        yield "a value without gradient (is it detached, or computed under torch.no_grad?)"


def _check_loss(
    value: Any, expected: Expected, server: Any, client: Any, net: Any, params: Tree, batch: Batch
) -> Faults:
    if isinstance(value, tuple) and len(value) == 2:
        value, kept = value
        yield from _check_tree(kept)
        for name, leaf in tree.items(kept):
            if not leaf.dim() or len(leaf) != len(batch.x):
                yield f"beside the loss {_describe(leaf)} as {name} for {len(batch.x)} samples"
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        yield _describe(value)
    yield from _check_gradient(value, params)


def _check_step(value: Any, expected: Expected, *arguments: Any) -> Faults:
    if not isinstance(value, tuple | list) or len(value) != 2:
        yield _describe(value)
    yield from _check_tree(value[0])
    if change := describe_form_change(value[0], arguments[3]):
        yield f"a trained tree in another form, {change}"


def _check_after_gradient(value: Any, expected: Expected, *arguments: Any) -> Faults:
    yield from _check_dict(value)
    if change := describe_form_change(value, arguments[1]):
        yield f"a client state in another form, {change}"


def _check_predict(value: Any, expected: Expected, net: Any, params: Tree, batch: Batch) -> Faults:
    if expected.default("predict"):
        return  # the network's answer
    shape = (len(batch.x), expected.classes)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != shape:
        yield f"{_describe(value)} for {shape[0]} samples of {shape[1]} classes"
    yield from _check_gradient(value, params)


OVERLAY = HookRule("a dict of trees, to be laid over the client's state", _check_dict)
MODEL = HookRule("a tree of tensors that `predict` takes", _check_tree)
PHASES = HookRule("a list of Phase, with bools or bool tensors as masks", _check_phases)
LOSS = HookRule(
    "the loss, a 0-dimensional tensor, or `(loss, tree of [batch, ...])`", _check_loss, often=True
)
STEP = HookRule(
    "two things: the new tree in the form of `params`, and the loss", _check_step, often=True
)
AFTER_GRADIENT = HookRule(
    "the client's state, in the form in which it was given", _check_after_gradient, often=True
)
HOOK_RULES = {
    "init": HookRule("two things: the server's tree and a client's state, a dict", _check_init),
    "turns": HookRule("a list of Turn, in which clients train, each once", _check_turns),
    "before_turn": OVERLAY,
    "sample": OVERLAY,
    "before_training": OVERLAY,
    "prepare": HookRule("the client's state, a dict of trees", _check_dict),
    "download": HookRule("a tree of tensors, `tree.Masked` or `tree.Agreed`", _check_tree),
    "start": HookRule("a tree of tensors to train", _check_tree),
    "phases": PHASES,
    "loss": LOSS,
    "after_training": OVERLAY,
    "finish": HookRule(
        "two things: the upload, a tree, and the client's state, a dict in the form of init's",
        _check_finish,
    ),
    "aggregate": HookRule(
        "two things: the server's tree and the clients' states, stacked, in the form of init's",
        _check_aggregate,
    ),
    "evaluated": MODEL,
    "before_evaluation": OVERLAY,
    "personal": MODEL,
    "predict": HookRule("logits `[batch, classes]`", _check_predict, often=True),
    "finetuning": PHASES,
}
"""By hook; those without a rule fail by themselves."""
