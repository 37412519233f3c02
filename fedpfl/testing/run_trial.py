"""Try plugins of a run before its first round, as their mistakes may change numbers in silence.

A run asks the promises that are marked for runs: a network's round equals a plain PyTorch loop from
a fresh build, everything is the same in another process that asks in another order, and clients on
the batched backend are those on loop. `fedpfl check` asks all promises.
"""

from __future__ import annotations

import logging

import torch

from fedpfl.config import plugins
from fedpfl.config.run import Run
from fedpfl.engine import Backend, FallbackBackend
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.origin import is_of_package
from fedpfl.testing.elsewhere import OtherProcess
from fedpfl.testing.network_promises import Samples
from fedpfl.testing.promises import Promise, Trial, Unkept, repeats_elsewhere
from fedpfl.testing.toy import MethodTrial
from fedpfl.testing.trials import PROMISES_BY_KIND, REGISTRIES, DealtTrial, Subject, make_trial

log = logging.getLogger(__name__)

LARGEST_DATA = 2**29
"""Bytes of samples that are worth reading twice."""
SAMPLES_OF_CLIENTS = (8, 3)
"""Each is one minibatch; the second is padded beside the first."""

_verdicts: dict[str, str] = {}
"""Faults of promises that this process has tried, "" for none."""


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
    for subject, trial in _make_trials(run, has_samples):
        for promise in PROMISES_BY_KIND[subject.kind]:
            if promise.for_runs not in asked:
                continue
            if trial.ask_elsewhere is None and promise.check is repeats_elsewhere:
                continue
            fault = _find_fault(run, subject, trial, promise)
            if not fault:
                continue
            fault = f"{subject}: {fault}; {promise.advice}"
            if promise.for_runs == "batched":
                _leave_out_batched(run, backend, fault)
            else:
                raise FedpflError(fault)


def _leave_out_batched(run: Run, backend: Backend | None, fault: str) -> None:
    """Compute by loop, where the engine may choose. Raises FedpflError elsewhere."""
    if not isinstance(backend, FallbackBackend):
        raise FedpflError(f"{fault}; or use engine=loop in place of engine={run.engine.backend}")
    log.info("engine: loop is taken; %s", fault)
    backend.leave_out_batched()


def _find_fault(run: Run, subject: Subject, trial: Trial, promise: Promise) -> str:
    """Return the fault of a promise, "" for none; results are cached by code."""
    groups = [run.config[kind] for kind in REGISTRIES]
    files = plugins.digest_plugins(run.config["plugins"])
    key = repr((subject, promise.title, groups, run.config["adapter"], files))
    if not files or key not in _verdicts:
        _verdicts[key] = _try_promise(trial, promise)
    return _verdicts[key]


def _try_promise(trial: Trial, promise: Promise) -> str:
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


def _make_trials(run: Run, has_samples: bool) -> list[tuple[Subject, Trial]]:
    """Make the trials of what plugins have added to a run."""
    config = run.config
    federation = run.federation
    other_process = OtherProcess(config["plugins"])
    trials: list[tuple[Subject, Trial]] = []

    # ---- Step 1: its method and its network.
    samples = Samples(SAMPLES_OF_CLIENTS, SAMPLES_OF_CLIENTS, federation.classes)
    # Adapters change the names of values, so the network is tried without, and built once more.
    is_adapted = config["adapter"]["name"] != "none"
    for kind in ("method", "model"):
        name = config[kind]["name"]
        if is_of_package(REGISTRIES[kind].registry[name]):
            continue
        subject = Subject(kind, name, config, shape=federation.shape, samples=samples)
        trial = make_trial(subject, net=None if is_adapted else run.net)
        # Another process knows plugins alone.
        if plugins.is_from_plugin(kind, name):
            other_process.attach(trial, subject)
        trials.append((subject, trial))

    # ---- Step 2: its data, which are read once more.
    kinds = ("dataset", "partition")
    added = [kind for kind in kinds if plugins.is_from_plugin(kind, config[kind]["name"])]
    is_readable = config["dataset"]["name"] != "memory" and federation.x.nbytes <= LARGEST_DATA
    if added and has_samples and is_readable:
        words = " ".join(f"{kind}={config[kind]['name']}" for kind in added)
        subject = Subject("dealing", words, config)
        trial = DealtTrial(run.samples_digest, federation)
        other_process.attach(trial, subject)
        trials.append((subject, trial))
    return trials
