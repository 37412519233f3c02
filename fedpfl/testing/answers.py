"""Answers of a method's hooks, beside the kinds that the contract annotates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.errors import MethodError
from fedpfl.methods import Method, Phase, Turn


def with_checked_answers(method: Method) -> Method:
    """Copy a method, its hooks raising MethodError for an answer of another kind."""
    checked_method = copy.copy(method)
    for hook_name in vars(Method):
        annotation = getattr(getattr(Method, hook_name), "__annotations__", {}).get("return")
        if annotation in FITS and not hook_name.startswith("_"):
            name = f"{type(method).__name__}.{hook_name}"
            hook = _with_check(getattr(method, hook_name), name, annotation)
            vars(checked_method)[hook_name] = hook
    return checked_method


def _with_check(hook: Callable[..., Any], name: str, annotation: str) -> Callable[..., Any]:
    """Make a hook that raises MethodError unless its answer fits an annotation."""

    def ask(*arguments: Any) -> Any:
        answer = hook(*arguments)
        if FITS[annotation](answer):
            return answer
        fault = "None (is a `return` missing?)"
        if answer is not None:
            fault = f"a {type(answer).__name__}, {answer!s:.60}"
        raise MethodError(
            f"{name} returned {fault}; it must return {annotation} with tensors as"
            " leaves (docs/design.md#a-method)"
        )

    return ask


def _is_tree(answer: Any) -> bool:
    if isinstance(answer, tree.Ragged):
        answer = answer.values
    elif hasattr(answer, "_asdict"):
        answer = answer._asdict()
    if isinstance(answer, dict):
        return all(map(_is_tree, answer.values()))
    return isinstance(answer, Tensor)


def _is_dict(answer: Any) -> bool:
    return isinstance(answer, dict) and _is_tree(answer)


def _is_pair(answer: Any) -> bool:
    return isinstance(answer, tuple | list) and [*map(_is_tree, answer)] == [True, True]


def _is_list_of(kind: type, answer: Any) -> bool:
    return isinstance(answer, list) and all(isinstance(part, kind) for part in answer)


FITS: dict[str, Callable[[Any], bool]] = {
    "Tree": _is_tree,
    "Tensor": lambda answer: isinstance(answer, Tensor),
    "dict[str, Tree]": _is_dict,
    "tuple[Tree, dict[str, Tree]]": lambda answer: _is_pair(answer) and _is_dict(answer[1]),
    "list[Turn]": lambda answer: _is_list_of(Turn, answer),
    "list[Phase]": lambda answer: _is_list_of(Phase, answer),
}
"""Whether an answer fits, by the annotation of a hook."""
