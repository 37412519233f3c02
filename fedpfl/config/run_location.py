"""Where a run belongs below outputs/."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path

from omegaconf import DictConfig, Node, OmegaConf

from fedpfl.config.plan import Plan, check_config
from fedpfl.config.resolvers import choice_folder
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.identity import identity
from fedpfl.ground.records import Values

INVALID = "no-run-of-these-settings"
"""Where a run would lie whose configuration is refused."""


def plan_run(cfg: DictConfig, path: Path) -> Plan:
    """Check the configuration of a run in its directory.

    Raises:
        FedpflError: It is wrong, or a key takes its value from Hydra's own, and the run therefore
            has no directory.
    """
    plan = check_config(cfg)
    if INVALID in path.parts:
        raise FedpflError(
            "where the run belongs follows from its keys, and one of them asks Hydra (${hydra:...})"
            " for a value that is not known then; give it a plain value, or set hydra.run.dir"
        )
    return plan


def run_subdir(config: Values, experiment: str | None, debug: str | None = None) -> str:
    """Return where a run belongs below outputs/: `<folder>/<method>/<key>/seed<k>`.

    The folder is the experiment's, an experiment's name that is in none, or else the data set;
    with `_<debug>`.
    """
    folder = choice_folder(experiment) if experiment else config["dataset"]["name"]
    if debug:
        folder = f"{folder}_{debug}"
    return f"{folder}/{config['method']['name']}/{identity(config)}/seed{config['seed']}"


# A key that asks where the run belongs would decide its own value. The variable is of one context,
# as other threads may ask at the same time.
_IS_RESOLVING = ContextVar("is_resolving", default=False)


# It is no closure: launchers pickle resolvers for their workers, and no ContextVar can be pickled.
def _resolve_subdir(*, _root_: DictConfig, _node_: Node) -> str:
    """Return where the run of a configuration belongs, or INVALID where it is refused."""
    if _IS_RESOLVING.get() or OmegaConf.select(_root_, "hydra") is None:
        raise FedpflError(
            f"{_node_._get_full_key(None)}: ${{fedpfl.run_subdir:}} follows from all keys of"
            " the run, so none of them may ask for it"
        )
    choices = OmegaConf.select(_root_, "hydra.runtime.choices") or {}
    token = _IS_RESOLVING.set(True)
    try:
        config = check_config(_root_).config
    except Exception:
        return INVALID  # the run reports the fault before it writes anything
    finally:
        _IS_RESOLVING.reset(token)
    folder = run_subdir(config, choices.get("experiment"), choices.get("debug"))
    # A trial lies apart: no run of the user's is taken for one, and no trial of another search
    # stands in the way.
    study = OmegaConf.select(_root_, "hydra.sweeper.study")
    return f"search-{study}/{folder}" if study else folder


def register_resolver() -> None:
    """Teach OmegaConf the resolver that conf/train.yaml names. Safe to repeat."""
    OmegaConf.register_new_resolver(
        "fedpfl.run_subdir",
        _resolve_subdir,
        replace=True,
        use_cache=False,
    )
