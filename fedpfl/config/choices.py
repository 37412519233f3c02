"""What a configuration group has to choose from, in folders too, and what a choice is called now."""

from __future__ import annotations

from pathlib import Path

CONF = Path(__file__).parents[1] / "conf"
OPTIONAL: dict[str, tuple[str, ...]] = {
    "quantile": ("q", "otherwise", "table", "title", "ema"),
    "norm": (),
    "score": (),
}
"""Groups that choose a hyperparameter, and their keys beside `name`; a method's `groups` names
those it has.
"""
FIXED = ("local", "eval", "stopping", "checkpoint", "state", "engine", "augment")
"""Groups that hold the same keys whatever is chosen; `schema.py` says what they are for."""
GROUPS = (
    "dataset",
    "partition",
    "model",
    "adapter",
    "method",
    *OPTIONAL,
    "privacy",
    "system",
    *FIXED,
    "logger",
)
NESTED = ("experiment",)
"""Groups whose folders hold choices; those of others hold what comes with a choice."""


NOW = {
    ("quantile", "adaptive"): "method=fedobp_adaptive",
    ("floco", "method.pers_epochs"): "a key of method=floco_plus",
}
"""What a choice of a group, or a key of a method, became."""


def choices(group: str) -> list[str]:
    """Return the names of a group's files, `folder/name` for those in a folder."""
    place = CONF / group
    files = place.rglob("*.yaml") if group in NESTED else place.glob("*.yaml")
    return sorted(str(path.relative_to(place).with_suffix("")) for path in files)


def moved(group: str, name: str) -> str:
    """Return the words that now choose what `name` chose; empty if nothing did.

    Of experiments, `folder_name` and `name` became `folder/name`; what ended in the name of a debug
    setting is chosen together with it.
    """
    if group not in NESTED:
        return NOW.get((group, name), "")
    known = choices(group)
    for debug in ("", *choices("debug")):
        base, words = (name.removesuffix(f"_{debug}"), f" debug={debug}") if debug else (name, "")
        if debug and base == name:
            continue
        now = [
            choice
            for choice in known
            if base in (choice, choice.replace("/", "_"), choice.partition("/")[2])
        ]
        if len(now) == 1:
            return f"{group}={now[0]}{words}"
        if words and (below := [choice for choice in known if choice.startswith(f"{base}/")]):
            return f"{group}={base}/...{words}, one of {', '.join(choice.partition('/')[2] for choice in below)}"
    return ""
