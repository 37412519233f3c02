"""The key that server and nodes must have in common: configuration, data and version."""

from __future__ import annotations

from fedpfl import __version__
from fedpfl.config.plan import Plan
from fedpfl.config.run import Run
from fedpfl.data import fingerprint
from fedpfl.runner import resume


def make_plan_key(plan: Plan) -> dict[str, str]:
    """Return the part of the key that is known before samples are."""
    return {
        "configuration": f"{plan.identity}-seed{plan.settings.seed}",
        "version": f"{__version__}-{fingerprint(resume.digest_code(plan))[:8]}",
    }


def make_run_key(run: Run) -> dict[str, str]:
    """Return the key of a run."""
    configuration, version = make_plan_key(run).values()
    return {"configuration": configuration, "data": run.fingerprint, "version": version}
