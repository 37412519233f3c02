"""Networks of a user's own keep every promise, or are refused in one line."""

import pytest
import torch
import torch.nn.functional as F

from fedpfl import models
from fedpfl.engine import Engine, RoundSetup, make_backend, make_initial_state, play_round
from fedpfl.engine.sampling import require_protectable_network
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS, Batch, FedAvg
from fedpfl.models.traits import made_up_samples
from fedpfl.testing.network_promises import (
    CLASSES,
    LOCAL,
    NETWORK_PROMISES,
    NetworkTrial,
    Samples,
    equals_plain_loop,
    make_federation,
)
from fedpfl.testing.promises import Unkept, repeats_elsewhere
from fedpfl.testing.toy import CPU
from tests import networks
from tests.conftest import (
    assert_same,
    keep_only,
    keep_quick,
    read_cases,
    record_rounds,
)

COHORT = [0, 1, 2, 3]
ON_LOOP_ALONE = {
    "checkpointed": "recomputes activations",
    "spectral": "Batching rule not implemented",
    "batch_norm_by_hand": "other samples of a minibatch",
    "detached_centre": "other samples of a minibatch",
    "batchnorm_without_statistics": "other samples of a batch in evaluation",
    "scaled_by_batch": "",
    "average_with_graph": "other samples of a minibatch",
    "slow_average": "other samples of a minibatch",
    "frozen_average": "",
}
"""Networks that the batched backend refuses, and what it says; "": whatever torch says."""

UNCLEAR_HEAD = {"prototypes": "hidden is the last layer"}

OUT = ("out.weight", "out.bias")
WEIGHT_NORM = "3.parametrizations.weight.original"
HEADS = {
    **dict.fromkeys(("head_first", "auxiliary_same_width", "temperature", "checkpointed"), OUT),
    "two_heads": ("other.weight", "other.bias"),  # the one that is called last
    **dict.fromkeys(("convolution_head", "frozen_body"), OUT),
    "wide_hidden": ("last.weight", "last.bias"),
    "tied_head": ("middle.weight", "out.bias"),
    "weight_normed": ("3.bias", f"{WEIGHT_NORM}0", f"{WEIGHT_NORM}1"),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name, network in networks.MODELS.items():
        monkeypatch.setitem(models.MODELS, name, network)


def build(name, seed=1, **options):
    return models.build_network(name, networks.SHAPE, CLASSES, seed, **options)


def make_trial(name, **arguments):
    return NetworkTrial(name, networks.SHAPE, **arguments)


def broken_promises(name):
    """Return the faults of a network by the name of the promise's check."""
    trial, broken = make_trial(name), {}
    for promise in NETWORK_PROMISES:
        if promise.check is repeats_elsewhere:
            continue
        try:
            promise.check(trial)
        except Unkept as error:
            broken[promise.check.__name__] = str(error)
    return broken


QUICK = {
    *("counter_assigned", "noisy_by_numpy", "tied", "frozen_average"),
    *("batchnorm_without_statistics", "made_still", "batch_norm_by_hand"),
}
"""One network of each kind: what moves beside parameters, draws, sharing, refusals."""


@pytest.mark.parametrize("name", keep_only(networks.KEPT, QUICK))
def test_a_network_of_ones_own_keeps_every_promise(name):
    broken = broken_promises(name)
    expected = {}
    if name in ON_LOOP_ALONE:
        expected["batched_equals_loop"] = ON_LOOP_ALONE[name]
    if name in UNCLEAR_HEAD:
        expected["head_is_found"] = UNCLEAR_HEAD[name]
    assert broken.keys() == expected.keys(), broken
    assert all(words in broken[check] for check, words in expected.items()), broken


@pytest.mark.parametrize("name", networks.REFUSED)
def test_a_network_that_leaks_is_refused_as_it_is_built_or_by_the_plain_loop(name):
    with pytest.raises((FedpflError, Unkept)) as error:
        equals_plain_loop(make_trial(name, net=build(name), samples=Samples((8, 3), (8, 3))))
    assert networks.REFUSED[name] in str(error.value)


REFUSED_RUNS = r"""
checkpointed | feddpa | loop | it recomputes activations
starts_later | fedavg | loop | forward changes the buffer average, but
starts_later_by_data | fedavg | loop | forward changes the buffer average, but
"""
"""Network | method | engine | what the line says."""
NOT_VECTORISED = [
    (name, "fedavg", "batched", "engine=batched cannot .*; use engine=loop$")
    for name in ON_LOOP_ALONE
    if name != "average_with_graph"
]


@pytest.mark.parametrize(
    ("name", "method", "engine", "says"),
    [*read_cases(REFUSED_RUNS, " | "), *keep_quick(NOT_VECTORISED, 4)],
)
def test_a_run_that_a_network_does_not_allow_is_refused_in_one_line(name, method, engine, says):
    """Single samples' gradients, mixed precisions, buffers that later calls write to, batching."""
    net, federation = build(name), make_federation(networks.SHAPE)
    with pytest.raises(FedpflError, match=f"^model={name}: {says}"):
        record_rounds(METHODS[method](), net, federation, [COHORT], engine=engine, local=LOCAL)


@pytest.mark.parametrize("name", HEADS)
def test_the_head_is_the_layer_that_answers_the_classes(name):
    parts = build(name).parts
    assert parts.head == HEADS[name]
    assert set(parts.layers[-1]) <= {*parts.head}
    assert sorted({*parts.head, *parts.body}) == sorted(build(name).params)


def test_an_unclear_head_is_refused_where_a_method_needs_it_until_it_is_named():
    name = head = "prototypes"
    with pytest.raises(
        FedpflError, match=r"which layer is the head is not clear .* model\.head=NAME"
    ):
        METHODS["fedper"]().init(build(name).params, build(name).parts)
    METHODS["fedavg"]().init(build(name).params, build(name).parts)
    named = build(name, head=head)
    _, client = METHODS["fedper"]().init(named.params, named.parts)
    assert all(entry == head or entry.startswith(f"{head}.") for entry in client["head"])
    with pytest.raises(FedpflError, match=r"model\.head=nowhere is no layer that trains; it has"):
        build(name, head="nowhere")


@pytest.mark.parametrize("name", ["temperature", "prior", "cosine_head", "softmaxed"])
def test_what_is_not_the_head_alone_is_refused_by_methods_that_compute_logits_with_it(name):
    net = build(name)
    for method in ("fedcp", "feddbe", "fedgen", "fedrod", "gpfl", "pfedfda"):
        with pytest.raises(FedpflError, match=r"computes logits as W z \+ b .* that of out"):
            METHODS[method]().init(net.params, net.parts)
    # FedALA has the network's loss for it.
    batch = Batch(x=made_up_samples(networks.SHAPE, 4), y=torch.arange(4) % CLASSES)
    values = {key: leaf + 0.5 for key, leaf in net.params.items()}
    head = {key: values[key] for key in net.parts.head}
    objective = METHODS["fedala"]()._objective(values, {"top": head}, net.bind({}), batch)
    expected = F.cross_entropy(net.bind({})(values, batch.x), batch.y)
    torch.testing.assert_close(objective(head), expected)


@pytest.mark.parametrize("name", ["tied", "not_persistent", "tied_head", "counter_assigned"])
def test_values_of_a_run_are_where_another_begins(name):
    """They hold what layers share once, and buffers that a state_dict leaves out."""
    first = build(name)
    values = {**first.params, **first.buffers, **first.fixed}
    values = {key: leaf + 1 for key, leaf in values.items()}
    assert_same(build(name, weights=values).params, {key: values[key] for key in first.params})


def test_buffers_that_no_call_writes_to_are_constants():
    """No client has them, so that they may be infinite, and do not hinder privacy."""
    net = build("causal_mask")
    assert not net.buffers
    assert [*build("writes_its_value").buffers] == ["calls", "average"]
    assert sorted(net.constants) == ["mask", "positions"]
    assert net.copy().module.mask is net.module.mask
    require_protectable_network(net)
    state = net.state_dict({**net.params, **net.fixed})
    net.copy_module().load_state_dict(state)
    make_backend(Engine("loop", precision="bf16"), net, CPU)


@pytest.mark.parametrize(
    ("name", "engine"), [("dropped", "loop"), ("noisy_by_numpy", "loop"), ("dropped", "batched")]
)
def test_counting_operations_draws_nothing(name, engine):
    """Neither the client that is measured for all nor another one trains otherwise."""
    net, states = build(name), []
    for local_by_client in (None, {}):
        backend = make_backend(Engine(engine, workers=2), net, CPU)
        setup = RoundSetup(backend, FedAvg(), make_federation(networks.SHAPE), LOCAL, 0)
        state = make_initial_state(FedAvg(), net, len(COHORT), CPU)
        states.append(play_round(setup, state, COHORT, local_by_client)[0].server)
    assert_same(*states)
