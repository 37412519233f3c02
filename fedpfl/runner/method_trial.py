"""What a plugin's method is refused for before its first round."""

from __future__ import annotations

import logging

from fedpfl import engine
from fedpfl.config.group_options import build_choice
from fedpfl.config.run import Run
from fedpfl.config.twins import import_twin
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.origin import is_of_package

log = logging.getLogger(__name__)

PADDING_FAULT = (
    "a client trains or answers otherwise where shorter minibatches are padded; use batch.loss,"
    " batch.mean and batch.sum in place of torch's"
)


def try_plugin_method(run: Run, backend: engine.Backend, state: engine.State) -> None:
    """Try the method of a run that begins, if a plugin has added it.

    A backend that chooses for itself is kept from what the method's losses do not bear.

    Raises:
        FedpflError: For a method whose numbers would be wrong.
    """
    if is_of_package(type(run.method)) or state.round > 0:
        return
    trial = _make_trial(run)
    _require_visible_state(run, trial)
    if backend.name == "loop" or not trial.depends_on_padding():
        return
    if not isinstance(backend, engine.FallbackBackend):
        raise FedpflError(_describe_padding_fault(run))
    log.info("engine: loop is taken; method=%s: %s", run.config["method"]["name"], PADDING_FAULT)
    backend.leave_out_batched()


def try_method_of_nodes(run: Run) -> None:
    """Try a federation's method, if a plugin has added it.

    `engine=auto` is each node's choice, by a device that nobody else sees.

    Raises:
        FedpflError: For a method whose numbers would be wrong, at whatever node.
    """
    if is_of_package(type(run.method)):
        return
    trial = _make_trial(run)
    _require_visible_state(run, trial)
    if run.engine.backend != "loop" and trial.depends_on_padding():
        raise FedpflError(_describe_padding_fault(run))


def _make_trial(run: Run) -> engine.PluginTrial:
    name = run.config["method"]["name"]
    twin_choices = {name: import_twin("METHODS", name)}
    return engine.PluginTrial(
        method=run.method,
        twin=build_choice(run.config, "method", twin_choices),
        net=run.net,
        federation=run.federation,
        engine=run.engine,
        local=run.local,
        device=run.device,
        seed=run.settings.seed,
    )


def _require_visible_state(run: Run, trial: engine.PluginTrial) -> None:
    """Raise FedpflError for what rounds in another order, or clients in turns, show."""
    fault = trial.find_hidden_state()
    if fault:
        raise FedpflError(
            f"method={run.config['method']['name']}: {fault}; something outlives a hook's call: a"
            " list, counter or generator on the class or in the module. Keep it in the client's or"
            " server's state, and draw in `sample`"
        )


def _describe_padding_fault(run: Run) -> str:
    name = run.config["method"]["name"]
    return f"method={name}: engine={run.engine.backend}: {PADDING_FAULT}, or engine=loop"
