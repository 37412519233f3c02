"""The form of what hooks answer: the names, shapes and dtypes of a tree's entries."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.errors import MethodError
from fedpfl.ground.tree import Entries, Tree


def persistent_entries(client: Entries, initial: Entries) -> Entries:
    """Return the entries of a client's state that last: those that `init` gave it."""
    return {name: client[name] for name in initial if name in client}


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
    names = new_forms.keys() | old_forms.keys()
    name = min(name for name in names if new_forms.get(name) != old_forms.get(name))
    old_form = _describe_form(old_forms.get(name))
    new_form = _describe_form(new_forms.get(name))
    return f"{name or 'it'} was {old_form} and is {new_form}"


def _describe_form(form: Any) -> str:
    """Return dtype and shape of a leaf in words."""
    return f"{form[0]} {list(form[1])}" if form else "missing"
