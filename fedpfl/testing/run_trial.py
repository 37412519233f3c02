"""Try plugins of a run before its first round, as their mistakes may change numbers in silence.

A run asks the promises that are marked for runs: a network's round equals a plain PyTorch loop from
a fresh build, everything is the same in another process that asks in another order, and clients on
the batched backend are those on loop. `fedpfl check` asks all promises.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fedpfl.config import plugins
from fedpfl.config.dealing import deal_data, share_nothing
from fedpfl.config.plan import check_config
from fedpfl.config.resolution import escape_interpolations
from fedpfl.config.run import Run
from fedpfl.data import Federation
from fedpfl.data.fingerprint import fingerprint
from fedpfl.engine import Backend, FallbackBackend
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.origin import is_of_package
from fedpfl.testing.elsewhere import OtherProcess
from fedpfl.testing.network_promises import NetworkTrial, Samples
from fedpfl.testing.promises import Promise, Unkept, promise_in, repeats_elsewhere
from fedpfl.testing.toy import MethodTrial
from fedpfl.testing.trials import (
    PROMISES_BY_KIND,
    REGISTRIES,
    AskElsewhere,
    Subject,
    make_network_trial,
)

log = logging.getLogger(__name__)

LARGEST_DATA = 2**29
"""Bytes of samples that are worth reading twice."""
SAMPLES_OF_CLIENTS = (8, 3)
"""Each is one minibatch; the second is padded beside the first."""

DEALING_PROMISES: list[Promise] = []
promise_in(DEALING_PROMISES)(
    "samples and their split are the same in another process",
    "draw from np.random.default_rng(0), in a partition of `seed`, keep nothing between calls, and"
    " sort the names of files and the members of sets",
    for_runs="always",
)(repeats_elsewhere)

_verdicts: dict[str, str] = {}
"""Faults of promises that this process has tried, "" for none."""


@dataclass(frozen=True)
class DealtSubject:
    """Samples as the clients of a configuration hold them.

    Attributes:
        config: The run's.
    """

    config: dict[str, Any]

    def make_trial(self) -> DealtTrial:
        """Read and deal them. Raises FedpflError."""
        plan = check_config(escape_interpolations({**self.config, "device": "cpu"}))
        dealt_data = deal_data(plan, share_nothing)
        return DealtTrial(dealt_data.samples_digest, dealt_data.federation)


@dataclass(frozen=True, eq=False)
class DealtTrial:
    """Samples that are read and dealt.

    Attributes:
        samples_digest: Of the data set.
        federation: Who holds which samples.
        ask_elsewhere: Returns the digests of another process.
    """

    samples_digest: str
    federation: Federation
    ask_elsewhere: AskElsewhere | None = None

    def digests(self, is_elsewhere: bool = False) -> dict[str, str]:
        """Return digests of the samples and of their split."""
        federation = self.federation
        split = fingerprint(federation.train, federation.test, federation.validation)
        return {"samples": self.samples_digest, "split": split}


def try_plugins(
    run: Run, backend: Backend | None = None, round_number: int = 0, has_samples: bool = True
) -> None:
    """Try the plugins of a run that begins.

    Args:
        run: The run, before its first round.
        backend: Its backend; None: nodes have their own.
        round_number: Rounds that are played already: then nothing is tried.
        has_samples: Whether the samples are here, and not at nodes.

    Raises:
        FedpflError: The numbers of a plugin's code would be wrong.
    """
    if round_number:
        return
    name = backend.name.partition(" ")[0] if backend else run.engine.backend
    asked = {"always"} if name == "loop" else {"always", "batched"}
    for title, (trial, promises) in _make_trials(run, has_samples).items():
        for promise in promises:
            fault = _find_fault(run, title, trial, promise) if promise.for_runs in asked else ""
            if fault and promise.for_runs == "batched":
                _leave_out_batched(run, backend, f"{title}: {fault}; {promise.advice}")
            elif fault:
                raise FedpflError(f"{title}: {fault}; {promise.advice}")


def _leave_out_batched(run: Run, backend: Backend | None, fault: str) -> None:
    """Compute by loop, where the engine may choose. Raises FedpflError elsewhere."""
    if not isinstance(backend, FallbackBackend):
        raise FedpflError(f"{fault}; or use engine=loop in place of engine={run.engine.backend}")
    log.info("engine: loop is taken; %s", fault)
    backend.leave_out_batched()


def _find_fault(run: Run, title: str, trial: Any, promise: Promise) -> str:
    """Return the fault of a promise, "" for none; results are cached by code."""
    groups = [run.config[kind] for kind in REGISTRIES]
    files = plugins.digest_plugins(run.config["plugins"])
    key = repr((title, promise.title, groups, run.config["adapter"], files))
    if not files or key not in _verdicts:
        _verdicts[key] = _try_promise(trial, promise)
    return _verdicts[key]


def _try_promise(trial: Any, promise: Promise) -> str:
    threads = torch.get_num_threads()
    # Other processes compute with as many, so that sums come in one order.
    torch.set_num_threads(1)
    try:
        promise.check(trial)
    except Unkept as fault:
        return str(fault)
    except Exception as error:
        # A method need not fit the tiny federation, and its first round names other mistakes.
        if not isinstance(trial, MethodTrial):
            return f"raised {error_text(error, with_class=True)}"
        log.debug("the trial of a plugin's method failed", exc_info=True)
    finally:
        torch.set_num_threads(threads)
    return ""


def _make_trials(run: Run, has_samples: bool) -> dict[str, tuple[Any, list[Promise]]]:
    """Make the trials of what plugins have added to a run, by title."""
    config = run.config
    names = {kind: config[kind]["name"] for kind in REGISTRIES}
    foreign = [kind for kind, name in names.items() if not is_of_package(_find_code(kind, name))]
    from_files = {kind for kind in foreign if plugins.is_from_plugin(kind, names[kind])}

    # ---- Step 1: another process, which knows plugins alone.
    subjects: dict[str, Any] = {}
    for kind in from_files & {"method", "model"}:
        subjects[kind] = _make_subject(run, kind)
    data_kinds = [kind for kind in ("dataset", "partition") if kind in from_files]
    is_readable = names["dataset"] != "memory" and run.federation.x.nbytes <= LARGEST_DATA
    if data_kinds and has_samples and is_readable:
        subjects["data"] = DealtSubject(config)
    other_process = OtherProcess(config["plugins"], subjects)

    # ---- Step 2: a trial for each of them.
    trials: dict[str, tuple[Any, list[Promise]]] = {}
    for kind in foreign:
        ask = partial(other_process.ask, kind) if kind in subjects else None
        if kind == "method":
            trial: Any = MethodTrial(run.method, ask_elsewhere=ask)
        elif kind == "model":
            trial = _make_network_trial(run, ask)
        else:
            continue
        promises = [
            own for own in PROMISES_BY_KIND[kind] if ask or own.check is not repeats_elsewhere
        ]
        trials[f"{kind}={names[kind]}"] = (trial, promises)
    if "data" in subjects:
        title = " ".join(f"{kind}={names[kind]}" for kind in data_kinds)
        ask = partial(other_process.ask, "data")
        trials[title] = (DealtTrial(run.samples_digest, run.federation, ask), DEALING_PROMISES)
    return trials


def _find_code(kind: str, name: str) -> Any:
    return REGISTRIES[kind].registry[name]


def _make_subject(run: Run, kind: str) -> Subject:
    federation = run.federation
    return Subject(
        kind=kind,
        name=run.config[kind]["name"],
        config=run.config,
        shape=federation.shape,
        samples=Samples(SAMPLES_OF_CLIENTS, SAMPLES_OF_CLIENTS, federation.classes),
    )


def _make_network_trial(run: Run, ask_elsewhere: AskElsewhere | None) -> NetworkTrial:
    """Make the trial of a run's network, which is built once more."""
    # Adapters change the names of values, so the network is tried without.
    is_adapted = run.config["adapter"]["name"] != "none"
    return make_network_trial(
        _make_subject(run, "model"),
        ask_elsewhere,
        net=None if is_adapted else run.net,
    )
