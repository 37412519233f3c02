"""Seconds of sub-models at their true size, beside the same with zeros around them.

    python -m benchmarks submodels [--model resnet8] [--methods a,b] [--rounds N]

Two clients of 160 random images, all in each round, five epochs of batches of 32. Every client has a
quarter of the width (of FlexFL's levels, the share of scalars that a quarter of the width has). A
method plays the same round at its true size and with zeros, in turns. CPU seconds of one thread,
medians and, of few rounds on a loaded machine the better figure, the least. The last line has what
FedSPU, whose clients hold whole networks, could save at most.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from unittest import mock

import torch

from benchmarks import harness
from benchmarks.harness import LOCAL, SEED, SHAPES, random_images
from fedpfl import engine, models
from fedpfl.config.plan import check_config
from fedpfl.data import Federation, build_federation, datasets, partition
from fedpfl.engine.backends import loop
from fedpfl.engine.training import evaluation, scripts
from fedpfl.engine.training.shard import gather_data

CLIENTS = 2
SAMPLES = 160
STEPS = 40
SIDES = {"lenet5": 28, "resnet8": 32, "fedspu_emnist": 28, "fedspu_cifar10": 32}
QUARTER = "method.widths=[0.25]"
OPTIONS = {
    "heterofl": QUARTER,
    "fedrolex": QUARTER,
    "fjord": QUARTER,
    "fjord ordered": QUARTER,
    "random_dropout": QUARTER,
    "hermes": QUARTER,
    "fedmp": QUARTER,
    "prunefl": QUARTER,
    "flexfl": "method.levels=[0.07,0.5,1.0]",
    "subflot": "method.rates=[0.75]",
}
TITLES = ("method", "with zeros, s", "true size, s", "x, medians", "x, least", "x FedAvg")


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = harness.make_parser("submodels", __doc__)
    parser.add_argument("--model", default="resnet8", choices=SIDES)
    parser.add_argument("--methods", default=",".join(OPTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    load = harness.machine_load()
    federation = _make_federation(SHAPES[SIDES[options.model]])
    turns = {"fedavg": _measure_method("fedavg", options.model, federation, options.rounds)}
    for name in options.methods.split(","):
        turns[name] = _measure_method(name, options.model, federation, options.rounds)

    # ---- Ratios
    baseline = statistics.median(turns["fedavg"][True])
    rows = []
    for name, seconds in turns.items():
        full, cut = (statistics.median(seconds[is_cut]) for is_cut in (False, True))
        least = min(seconds[False]) / min(seconds[True])
        figures = (full, cut, full / cut, least, cut / baseline)
        rows.append([name, *(f"{figure:.2f}" for figure in figures)])
    print(harness.format_table(TITLES, rows))
    print(f"\n{options.model}, load before: {load:.2f}, after: {os.getloadavg()[0]:.2f}")
    share = _measure_step_without_weights(options.model, federation)
    print(f"a step without gradients of weights, in steps with them: {share:.2f}")


def _measure_step_without_weights(model: str, federation: Federation) -> float:
    """Return the time of a step that has no gradients of weights behind the first layer.

    It is in units of a step with all gradients, both as medians.
    """
    net = models.build_network(model, federation.shape, federation.classes, SEED)
    batch = gather_data(federation, torch.arange(LOCAL.batch_size)).rows(slice(None))
    params = {name: leaf.clone().requires_grad_() for name, leaf in net.params.items()}
    leaves = list(params.values())
    kept_leaves = [leaf for i, leaf in enumerate(leaves) if i == 0 or leaf.dim() == 1]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(STEPS):
        for has_weights, measured in seconds.items():
            start_time = time.process_time()
            bound = net.bind({"main": net.buffers}, training=True)
            loss = batch.loss(bound(params, batch.x))
            torch.autograd.grad(loss, leaves if has_weights else kept_leaves)
            measured.append(time.process_time() - start_time)
    return statistics.median(seconds[False]) / statistics.median(seconds[True])


def _make_federation(shape: tuple[int, ...]) -> Federation:
    """Return two clients of random images."""
    x, y = random_images(CLIENTS * SAMPLES, shape)
    samples = datasets.Samples("random", x, y, 10, (0.5,) * shape[0], (0.25,) * shape[0])
    return build_federation(samples, partition.published(y.numpy(), CLIENTS, SEED, alpha=100.0))


def _measure_method(
    name: str, model: str, federation: Federation, rounds: int
) -> dict[bool, list[float]]:
    """Return the CPU seconds of a round, at the true size or not."""
    device = torch.device("cpu")
    method_name, _, variant = name.partition(" ")
    overrides = [f"method={method_name}"]
    if name in OPTIONS:
        overrides.append(OPTIONS[name])
    if variant:
        overrides.append(f"method.{variant}=true")
    if name == "flexfl":
        overrides.append("method.devices=[1,0,0]")
    method = check_config(harness.compose_config(overrides)).method
    net = models.build_network(model, federation.shape, federation.classes, SEED)
    # Scripts come at once, as they are there for most of a run.
    with mock.patch.object(scripts, "STEPS_BEFORE", 0):
        backend = engine.make_backend(engine.Engine("loop", workers=1), net, device)
    setup = engine.RoundSetup(backend, method, federation, LOCAL, SEED)
    state = engine.make_initial_state(method, net, CLIENTS, device)
    cohort = list(range(CLIENTS))
    state, _ = engine.play_round(setup, state, cohort)  # ranks neurons, and checks hooks
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for is_cut, measured in seconds.items():
            with ExitStack() as patches:
                if not is_cut:
                    patches.enter_context(mock.patch.object(loop, "cut_job", return_value=None))
                    patches.enter_context(
                        mock.patch.object(
                            evaluation,
                            "bind_for_evaluation",
                            lambda net, _, buffers: net.bind(buffers),
                        )
                    )
                start_time = time.process_time()
                engine.play_round(setup, state, cohort)
                measured.append(time.process_time() - start_time)
    return seconds
