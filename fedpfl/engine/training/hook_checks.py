"""Checks of a hook's first answer, where mistakes would change numbers in silence."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpfl.engine.training.forms import (
    describe_form_change,
    persistent_entries,
    require_unchanged,
    tensor_versions,
)
from fedpfl.engine.training.vectorize import Hook
from fedpfl.ground import tree
from fedpfl.ground.errors import MethodError
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import FACTS, Batch, Method, Phase, Turn

VMAP_ERRORS = (
    "vmap: It looks like",
    "dynamic shape",
    "Cannot access data pointer",
    "aten::equal",
    "torch.allclose isn't",
)
"""What PyTorch says where a vectorised function asks for the values of a tensor."""
ONE_HOT_ADVICE = (
    "calls one_hot, which looks at the values of a tensor, but it is asked about many clients at"
    " once: write (y[:, None] == torch.arange(classes, device=y.device)).float()"
)
VMAP_ADVICE = (
    "looks at the values of a tensor (if, while, int(), .item(), x[mask], x[number]), but it is"
    " asked about many clients at once: use torch.where, x[number[None]][0], or find it out in"
    " before_training or after_training, which may look"
)


@dataclass
class Expected:
    """Hold the references of checks, as far as they are known.

    Attributes:
        method: The method.
        client: A client's initial state.
        classes: The number of classes.
        checked: The hooks that have answered.
    """

    method: Method
    client: Entries | None = None
    classes: int = 0
    checked: set[str] = field(default_factory=set)


class HookRule(NamedTuple):
    """State a hook's right answer.

    Attributes:
        must: For the message.
        find_fault: `find_fault(answer, expected, *arguments)` returns a fault of an answer, or "".
    """

    must: str
    find_fault: Callable[..., str]


def with_hook_checks(
    method: Method,
    client: Entries | None = None,
    classes: int = 0,
) -> Method:
    """Return the method with hooks that raise MethodError if their first answer breaks a rule.

    Type and equality are the same.

    Args:
        method: Is copied.
        client: A client's initial state, if it is known.
        classes: The number of classes, if it is known.
    """
    checked_method = copy.copy(method)
    expected = Expected(method, client, classes)
    for hook_name, rule in HOOK_RULES.items():
        hook = getattr(method, hook_name)
        name = f"{type(method).__name__}.{hook_name}"
        vars(checked_method)[hook_name] = CheckedHook(hook, name, rule, expected)
    return checked_method


@dataclass(frozen=True)
class CheckedHook:
    """Call a hook, and raise MethodError if its first answer breaks its rule.

    So it does if the hook changes its arguments, or looks at values that it may not see.
    """

    hook: Hook
    name: str = field(compare=False)
    rule: HookRule = field(compare=False)
    expected: Expected = field(compare=False)

    def __call__(self, *arguments: Any) -> Any:
        """Return the hook's answer."""
        if self.name in self.expected.checked:
            return self.hook(*arguments)
        self.expected.checked.add(self.name)
        trees = {}
        for name, argument in zip(inspect.signature(self.hook).parameters, arguments, strict=False):
            if isinstance(argument, dict | Tensor):
                trees[name] = argument
        old_versions = tensor_versions(trees)
        answer = self._call_hook(arguments)
        require_unchanged(trees, old_versions, self.name)
        fault = self.rule.find_fault(answer, self.expected, *arguments)
        if fault:
            raise MethodError(
                f"{self.name} returned {fault}; it must return {self.rule.must} "
                "(docs/design.md#a-method)"
            )
        if self.rule == PHASES:
            return [self._with_checked_functions(phase) for phase in answer]
        return answer

    def _call_hook(self, arguments: tuple[Any, ...]) -> Any:
        """Return the hook's answer; explain errors of vectorisation."""
        try:
            return self.hook(*arguments)
        except RuntimeError as error:
            advice = vmap_advice(error)
            if not advice:
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise MethodError(f"{self.name} {advice} ({frame.filename}:{frame.lineno})") from error

    def _with_checked_functions(self, phase: Phase) -> Phase:
        """Return a phase with its own functions checked in the same way."""
        method_name = type(self.expected.method).__name__
        checked_functions: dict[str, Any] = {}
        for key, rule in PHASE_RULES.items():
            function = getattr(phase, key)
            if function:
                name = f"{method_name}.{getattr(function, '__name__', 'phases')} (Phase.{key})"
                checked_functions[key] = CheckedHook(function, name, rule, self.expected)
        return phase._replace(**checked_functions)


def vmap_advice(error: BaseException) -> str:
    """Return advice about a vectorised hook that looked at values, or ""."""
    is_vmap_error = any(sign in str(error) for sign in VMAP_ERRORS)
    if not isinstance(error, RuntimeError) or not is_vmap_error:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and "one_hot(" in (frames[-1].line or ""):
        return ONE_HOT_ADVICE
    return VMAP_ADVICE


# ---- faults of answers


def _describe(value: Any) -> str:
    if value is None:
        return "None (is a `return` missing?)"
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}"


def _check_tree(value: Any, *_: Any) -> str:
    """Name a leaf that is no tensor."""
    if isinstance(value, tree.Ragged):
        value = value.values
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Tensor):
        return ""
    if not isinstance(value, dict):
        return _describe(value)
    for name, part in value.items():
        fault = _check_tree(part)
        if fault:
            return f"{fault} in {name!r}"
    return ""


def _check_dict(value: Any, *_: Any) -> str:
    return _check_tree(value) if isinstance(value, dict) else _describe(value)


def _check_pair(value: Any, *_: Any) -> str:
    """Name a fault of a tree and a client's state."""
    if not isinstance(value, tuple | list) or hasattr(value, "_fields") or len(value) != 2:
        return _describe(value)
    return _check_tree(value[0]) or _check_dict(value[1])


def _check_init(value: Any, *_: Any) -> str:
    fault = _check_pair(value)
    facts = [] if fault else [name for name in FACTS if name in value[1]]
    if facts:
        return f"a client state with {facts[0]!r}, which the engine lays over it: leave it out"
    return fault


def _check_finish(value: Any, expected: Expected, *_: Any) -> str:
    fault = _check_pair(value)
    if fault or expected.client is None:
        return fault
    lasting_entries = persistent_entries(value[1], expected.client)
    return _describe_state_change(lasting_entries, expected.client, " than init's")


def _describe_state_change(new: Tree, old: Tree, where: str = "") -> str:
    change = describe_form_change(new, old)
    return f"a client state in another form{where}, {change}" if change else ""


def _check_aggregate(value: Any, expected: Expected, *arguments: Any) -> str:
    fault = _check_pair(value)
    cohort = len(arguments[4])
    for name, leaf in tree.items({} if fault else value[1]):
        if leaf.dim() == 0 or len(leaf) != cohort:
            return f"the clients' {name} as {_describe(leaf)} for a cohort of {cohort}"
    return fault


def _check_turns(value: Any, *_: Any) -> str:
    if not isinstance(value, list) or not all(isinstance(turn, Turn) for turn in value):
        return _describe(value)
    trained = [number for turn in value if not turn.survey for number in turn.clients]
    for numbers in (trained, *(turn.clients for turn in value)):
        if len(numbers) != len(set(numbers)):
            return f"a client twice, of {sorted(numbers)}"
    return "" if trained else "no turn in which clients train"


def _check_phases(value: Any, *_: Any) -> str:
    if not isinstance(value, list):
        return _describe(value)
    for phase in value:
        if not isinstance(phase, Phase):
            return f"a list with {_describe(phase)} in it"
        if not isinstance(phase.epochs, Integral) or phase.epochs < 0:
            return f"a phase of {phase.epochs!r} epochs"
        if not isinstance(phase.batches, Integral) or phase.batches < 1:
            return f"a phase of {phase.batches!r} batches"
        # Numbers would scale gradients.
        for name, leaf in tree.items({} if phase.mask is None else phase.mask):
            if not isinstance(leaf, bool) and getattr(leaf, "dtype", None) != torch.bool:
                return f"a phase whose mask has {_describe(leaf)} for {name or 'all'}"
    return ""


def _check_gradient(value: Any, params: Tree) -> str:
    """Name a fault for training without a gradient, silent on the batched backend."""
    is_asked = any(leaf.requires_grad for leaf in tree.leaves(params))
    if torch.is_grad_enabled() and is_asked and not value.requires_grad:
        return "a value without gradient (is it detached, or computed under torch.no_grad?)"
    return ""


def _check_loss(
    value: Any, expected: Expected, server: Any, client: Any, net: Any, params: Tree, batch: Batch
) -> str:
    record: Tree = {}
    if isinstance(value, tuple) and len(value) == 2:
        value, record = value
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        return _describe(value)
    fault = _check_tree(record)
    for name, leaf in tree.items({} if fault else record):
        if not leaf.dim() or len(leaf) != len(batch.x):
            return f"beside the loss {_describe(leaf)} as {name} for {len(batch.x)} samples"
    return fault or _check_gradient(value, params)


def _check_step(value: Any, expected: Expected, *arguments: Any) -> str:
    if not isinstance(value, tuple | list) or len(value) != 2:
        return _describe(value)
    change = _check_tree(value[0]) or describe_form_change(value[0], arguments[3])
    return f"a trained tree in another form, {change}" if change else ""


def _check_after_gradient(value: Any, expected: Expected, *arguments: Any) -> str:
    return _check_dict(value) or _describe_state_change(value, arguments[1])


def _check_predict(value: Any, expected: Expected, net: Any, params: Tree, batch: Batch) -> str:
    if type(expected.method).predict is Method.predict:
        return ""  # the network's answer
    shape = (len(batch.x), expected.classes)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != shape:
        return f"{_describe(value)} for {shape[0]} samples of {shape[1]} classes"
    return _check_gradient(value, params)


OVERLAY = HookRule("a dict of trees, to be laid over the client's state", _check_dict)
MODEL = HookRule("a tree of tensors that `predict` takes", _check_tree)
PHASES = HookRule("a list of Phase, with bools or bool tensors as masks", _check_phases)
LOSS = HookRule("the loss, a 0-dimensional tensor, or `(loss, tree of [batch, ...])`", _check_loss)
PHASE_RULES = {
    "loss": LOSS,
    "step": HookRule("two things: the new tree in the form of `params`, and the loss", _check_step),
    "after_gradient": HookRule(
        "the client's state, in the form in which it was given", _check_after_gradient
    ),
}
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
    "predict": HookRule("logits `[batch, classes]`", _check_predict),
    "finetuning": PHASES,
}
"""By hook; those without a rule fail by themselves."""
