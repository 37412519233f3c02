"""The choices of configuration groups, in folders too."""

from __future__ import annotations

from pathlib import Path

CONF = Path(__file__).parents[1] / "conf"
OPTIONAL_GROUPS = ("quantile", "norm", "score")
"""Groups that choose a hyperparameter; a method's `groups` names those it has."""
FIXED = ("local", "eval", "stopping", "checkpoint", "state", "engine", "augment", "shift")
"""Groups that hold the same keys whatever is chosen; `schema.py` says what they are for."""
GROUPS = (
    "dataset",
    "partition",
    "model",
    "adapter",
    "method",
    *OPTIONAL_GROUPS,
    "privacy",
    "attack",
    "defence",
    "system",
    *FIXED,
    "logger",
)
NESTED_GROUPS = ("experiment",)
"""Groups whose folders hold choices; those of others hold what comes with a choice."""


def list_choices(group: str) -> list[str]:
    """Return the names of a group's files, `folder/name` for those in a folder."""
    folder = CONF / group
    files = folder.rglob("*.yaml") if group in NESTED_GROUPS else folder.glob("*.yaml")
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in files)
