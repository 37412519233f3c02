"""Checks of the answers of a method's hooks, when a process first calls them."""

from __future__ import annotations

import copy
import functools
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import Tensor

from fedpfl.engine.training.forms import require_unchanged, tensor_versions
from fedpfl.engine.training.hook_rules import (
    AFTER_GRADIENT,
    HOOK_RULES,
    LOSS,
    PHASES,
    STEP,
    Expected,
    HookRule,
)
from fedpfl.ground.errors import MethodError
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method, Phase

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


def with_hook_checks(
    method: Method,
    client: dict[str, Tree] | None = None,
    classes: int = 0,
) -> Method:
    """Return the method with hooks that raise MethodError where they break their rule.

    Type and equality are the same.

    Args:
        method: Is copied.
        client: A client's initial state, if it is known.
        classes: The number of classes, if it is known.
    """
    checked_method = copy.copy(method)
    expected = Expected(method, client, classes)
    for hook_name, rule in HOOK_RULES.items():
        vars(checked_method)[hook_name] = CheckedHook(
            hook=getattr(method, hook_name),
            name=f"{type(method).__name__}.{hook_name}",
            rule=rule,
            expected=expected,
        )
    return checked_method


def vmap_advice(error: BaseException) -> str:
    """Return advice about a vectorised hook that looked at values, or ""."""
    is_vmap_error = any(sign in str(error) for sign in VMAP_ERRORS)
    if not isinstance(error, RuntimeError) or not is_vmap_error:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and "one_hot(" in (frames[-1].line or ""):
        return ONE_HOT_ADVICE
    return VMAP_ADVICE


@dataclass(frozen=True)
class CheckedHook:
    """Call a hook, and raise MethodError where it breaks its rule.

    So it does where the hook changes its arguments, or looks at values that it may not see.
    """

    hook: Callable[..., Any]
    name: str = field(compare=False)
    rule: HookRule = field(compare=False)
    expected: Expected = field(compare=False)

    def __call__(self, *arguments: Any) -> Any:
        """Return the hook's answer."""
        if self.rule.often and self.name in self.expected.checked:
            return self.hook(*arguments)
        self.expected.checked.add(self.name)
        names = _argument_names(self.hook)
        trees = {
            name: argument
            for name, argument in zip(names, arguments, strict=False)
            if isinstance(argument, dict | Tensor)
        }
        old_versions = tensor_versions(trees)
        answer = self._call_hook(arguments)
        require_unchanged(trees, old_versions, self.name)
        if fault := next(self.rule.faults(answer, self.expected, *arguments), ""):
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
        """Return a phase whose own functions are checked in the same way."""
        method_name = type(self.expected.method).__name__
        rules = {"loss": LOSS, "step": STEP, "after_gradient": AFTER_GRADIENT}
        checked_functions: dict[str, Any] = {}
        for key, rule in rules.items():
            function = getattr(phase, key)
            if function:
                function_name = getattr(function, "__name__", "phases")
                checked_functions[key] = CheckedHook(
                    hook=function,
                    name=f"{method_name}.{function_name} (Phase.{key})",
                    rule=rule,
                    expected=self.expected,
                )
        return phase._replace(**checked_functions)


def _argument_names(hook: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a hook's arguments."""
    if isinstance(hook, MethodType):
        return _signature_names(hook.__func__, is_bound=True)
    return _signature_names(hook, is_bound=False)


# To read a signature takes longer than many hooks do.
@functools.lru_cache(maxsize=256)
def _signature_names(function: Callable[..., Any], is_bound: bool) -> tuple[str, ...]:
    """Return the names of a function's arguments, without the object that it is bound to."""
    hook = MethodType(function, object) if is_bound else function
    return tuple(inspect.signature(hook).parameters)
