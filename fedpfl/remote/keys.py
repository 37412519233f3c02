"""What server and nodes must have in common, and how they find out where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedpfl import __version__
from fedpfl.config.plan import Plan
from fedpfl.config.run import Run
from fedpfl.data import fingerprint
from fedpfl.runner import resume


def make_plan_key(plan: Plan) -> dict[str, str]:
    """Return what is common to both sides before samples are known, by name."""
    return {
        "configuration": f"{plan.identity}-seed{plan.settings.seed}",
        "version": f"{__version__}-{fingerprint(resume.digest_code(plan))[:8]}",
    }


def make_run_key(run: Run) -> dict[str, str]:
    """Return what server and nodes must have in common, by name."""
    configuration, version = make_plan_key(run).values()
    return {"configuration": configuration, "data": run.fingerprint, "version": version}


def describe_mismatch(
    key: Any, expected_key: Mapping[str, str], sender: str = "it", receiver: str = "the server"
) -> str:
    """Return the first difference between two compatibility keys as a text, "" if they agree."""
    entries = key if isinstance(key, dict) else {}
    for name, expected in expected_key.items():
        if entries.get(name) != expected:
            return (
                f"{sender} has {name} {entries.get(name)}, {receiver} {expected}; give both the "
                "same command, data and packages"
            )
    return ""
