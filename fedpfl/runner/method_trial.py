"""What a plugin's method is refused for before its first round."""

from __future__ import annotations

import logging

from fedpfl import engine
from fedpfl.config.run import Run
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.origin import is_of_package

log = logging.getLogger(__name__)


def try_plugin_method(run: Run, backend: engine.Backend, state: engine.State) -> None:
    """Try the method of a run that begins, if a plugin has added it.

    A backend that chooses for itself is kept from what the method's losses do not bear.

    Raises:
        FedpflError: For a method whose numbers would be wrong.
    """
    if is_of_package(type(run.method)) or state.round > 0:
        return
    name = run.config["method"]["name"]
    trial = engine.PluginTrial(
        method=run.method,
        net=run.net,
        federation=run.federation,
        engine=run.engine,
        local=run.local,
        device=run.device,
        seed=run.settings.seed,
    )

    # ---- Step 1: the same round twice, and clients in turns.
    if fault := trial.find_hidden_state():
        raise FedpflError(
            f"method={name}: {fault}; something outlives a hook's call: a list, counter or generator on the class or in"
            " the module. Keep it in the client's or server's state, and draw in `sample`"
        )

    # ---- Step 2: padded minibatches, where there may be some.
    if backend.name == "loop":
        return
    if trial.depends_on_padding():
        fault = (
            "a client trains or answers otherwise where shorter minibatches are padded; use"
            " batch.loss, batch.mean and batch.sum in place of torch's"
        )
        if not isinstance(backend, engine.AutotunedBackend):
            raise FedpflError(f"method={name}: engine=batched: {fault}, or engine=loop")
        log.info("engine: loop is taken; method=%s: %s", name, fault)
        backend.leave_out_batched()
