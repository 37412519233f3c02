"""The form of what hooks answer: the names, shapes and dtypes of a tree's entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.errors import MethodError
from fedpfl.ground.tree import Tree


def persistent_entries(client: dict[str, Tree], initial: dict[str, Tree]) -> dict[str, Tree]:
    """Return the entries of a client's state that last: those that `init` gave it."""
    return {name: client[name] for name in initial if name in client}


def require_equal_forms(hook: str, answers: Mapping[int, dict[str, Tree]]) -> None:
    """Raise MethodError where a hook's answers for two clients differ in form.

    Args:
        hook: Its name.
        answers: By client; Ragged values may differ in length.
    """

    def drop_rows(ragged: tree.Ragged) -> Tree:
        return tree.map(lambda leaf: leaf[:0], ragged.values)

    forms = {}
    for client, answer in sorted(answers.items()):
        forms[client] = tree.specs(tree.at_ragged(drop_rows, answer))
    reference, *others = forms
    for client in others:
        if forms[client] == forms[reference]:
            continue
        name = _first_difference(forms[reference], forms[client])
        reference_form = _describe_form(forms[reference].get(name))
        form = _describe_form(forms[client].get(name))
        raise MethodError(
            f"{hook} answers with other forms: {name} is {reference_form} for client {reference} "
            f"and {form} for client {client}; answer all alike, and where their first axis differs "
            "by tree.Ragged(values) (docs/design.md#a-method)"
        )


def tensor_versions(shown_trees: Tree) -> dict[str, tuple[int, int]]:
    """Return tensors by name, and how often each was changed in place."""
    return {
        name: (id(leaf), leaf._version)
        for name, leaf in tree.items(shown_trees)
        if isinstance(leaf, Tensor)
    }


def require_unchanged(
    shown_trees: Tree, old_versions: dict[str, tuple[int, int]], name: str
) -> None:
    """Raise MethodError where `name` has changed a tree that it was shown in place."""
    changes = tensor_versions(shown_trees).items() ^ old_versions.items()
    if changes:
        raise MethodError(
            f"{name} changed its argument {min(changes)[0]} in place; return new trees, "
            "leave those given"
        )


def describe_form_change(new: Tree, old: Tree) -> str:
    """Return an entry in which a tree has another form than before, or ""."""
    new_forms = tree.specs(new)
    old_forms = tree.specs(old)
    if new_forms == old_forms:
        return ""
    name = _first_difference(new_forms, old_forms)
    old_form = _describe_form(old_forms.get(name))
    new_form = _describe_form(new_forms.get(name))
    return f"{name or 'it'} was {old_form} and is {new_form}"


def _first_difference(forms: dict[str, Any], others: dict[str, Any]) -> str:
    """Return the first name, in alphabetical order, at which two dicts of forms differ."""
    names = forms.keys() | others.keys()
    return min(name for name in names if forms.get(name) != others.get(name))


def _describe_form(form: Any) -> str:
    """Return dtype and shape of a leaf in words."""
    return f"{form[0]} {list(form[1])}" if form else "missing"
