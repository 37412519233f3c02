"""Optimisers, schedules of the learning rate and a fixed number of steps, against torch.optim and
by hand; settings of training and of the engine out of their ranges.
"""

import dataclasses
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, StepLR

from fedpfl.engine import Engine, RoundSetup, Stopping, make_backend, make_initial_state, play_round
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.local import Local
from fedpfl.engine.training.minibatches import SampleSource, plan_steps
from fedpfl.engine.training.sgd import (
    as_float_mask,
    initial_moments,
    masked_moments,
    optimizer_step_,
)
from fedpfl.engine.training.train_plan import TrainPlan
from fedpfl.ground import tree
from fedpfl.methods import FedAvg, FedSelect, Phase
from tests.conftest import (
    CPU,
    HEAD,
    LOOP,
    as_engine,
    assert_close,
    assert_same,
    differing,
    keep_quick,
    make_federation,
    read_cases,
    record_states,
    tiny,
)
from tests.engine.test_program import Capture

KINDS = {
    "nesterov": (SGD, {"momentum": 0.7, "weight_decay": 1e-2, "nesterov": True}),
    "sgd": (SGD, {"momentum": 0.9, "weight_decay": 1e-2}),
    "adam": (Adam, {}),
    "adam-decayed": (Adam, {"betas": (0.8, 0.99), "eps": 1e-3, "weight_decay": 0.1}),
    "adam-without-mean": (Adam, {"betas": (0.0, 0.9)}),
    "adamw": (AdamW, {"weight_decay": 0.1, "eps": 1e-4}),
}
NAMED = pytest.mark.parametrize("kind", KINDS)
DRAWS = Draws(0, "train", 1)
UNEVEN = [0, 2, 4, 6, 7, 8]  # one of six ends an epoch after a step, and wider steps run over it


def local_of(kind: str, **more) -> Local:
    optimizer, values = KINDS[kind]
    usual = {"epochs": 2, "batch_size": 32, "lr": 0.05, "optimizer": optimizer.__name__.lower()}
    return Local(**{**usual, **values, **more})


def problem(steps=6):
    """Return a tree, and the gradients of its leaves in so many steps."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (
        [torch.randn(shape, generator=generator) for shape in ((4, 3), (5,), (2, 2, 2))]
        for _ in range(1 + steps)
    )
    return {str(i): leaf for i, leaf in enumerate(start)}, gradients


def planned(local, *masks):
    return TrainPlan(None, [Phase(1, mask) for mask in masks or (None,)], local)


@NAMED
def test_a_step_is_torch_optims_bit_for_bit_at_any_rate(kind):
    start, gradients = problem()
    params, free, local = tree.leaves(tree.clone(start)), [None] * 3, local_of(kind)
    moments, theirs = initial_moments(planned(local), start)["main"], tree.leaves(start)
    optimizer = KINDS[kind][0](theirs, lr=0.05, **KINDS[kind][1])
    for number, grads in enumerate(gradients):
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.clone()
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + number)
        optimizer.step()
        now = dataclasses.replace(local, lr=0.05 / (1 + number))
        optimizer_step_(params, moments, [g.clone() for g in grads], free, now)
    assert_same(params, theirs)


@NAMED
@pytest.mark.parametrize("stacked", [False, True])
def test_entries_of_masks_that_take_turns_have_optimisers_of_their_own(kind, stacked):
    """The masked halves of a tensor as two optimisers, whose steps are counted apart, and one that
    always moves.
    """
    start, gradients = problem(9)
    local, mask = local_of(kind), torch.rand(4, 3, generator=torch.Generator().manual_seed(2)) < 0.5
    one, other, always = start["0"].clone(), start["0"].clone(), start["1"].clone()
    optimizers = [KINDS[kind][0]([p], lr=0.05, **KINDS[kind][1]) for p in (one, other, always)]
    own = {"0": start["0"].clone(), "1": start["1"].clone()}
    if stacked:
        own, mask = tree.map(lambda leaf: leaf[None], own), mask[None]
    leaves = tree.leaves(own)
    plan = planned(local, {"0": mask, "1": True}, {"0": ~mask, "1": True})
    moments = initial_moments(plan, own, stacked)["main"]
    for phase in range(3):
        now = [mask if phase % 2 == 0 else ~mask, None]
        flags = now if stacked else [as_float_mask(now[0], leaves[0]), None]
        with masked_moments(moments, now, local):
            for first, second, _ in gradients[3 * phase : 3 * phase + 3]:
                grads = [first[None], second[None]] if stacked else [first, second]
                optimizer_step_(leaves, moments, grads, flags, local, stacked)
                one.grad = other.grad = first
                always.grad = second
                optimizers[phase % 2].step()
                optimizers[2].step()
    assert_close(leaves[0].view(4, 3), torch.where(mask.view(4, 3), one, other))
    assert_close(leaves[1].view(5), always)
    assert differing(one, start["0"])


@dataclasses.dataclass(frozen=True)
class Streams(FedAvg):
    """Everything, in between the head alone, twice over; and at the end once more everything."""

    def phases(self, server, client, params, epochs):
        head = {name: name in HEAD for name in params}
        return [*(2 * [Phase(1), Phase(1, head, "head")]), Phase(1, None, "last")]


@pytest.mark.parametrize("kind", keep_quick(reversed(KINDS), 2))
def test_a_stream_has_an_optimiser_of_its_own(kind, net, federation):
    """Moments continue where it does, though another stream has moved the same entries in between."""
    client, local, values = 4, local_of(kind), KINDS[kind][1] | {"lr": 0.05}
    module = tiny().module.to(memory_format=torch.channels_last)
    module.load_state_dict(dict(net.params))
    own, params = federation.train[client], dict(module.named_parameters())
    everything, head, last = (
        KINDS[kind][0](chosen, **values)
        for chosen in (params.values(), [params[name] for name in HEAD], params.values())
    )
    plan = [("main", 0, everything), ("head", 0, head), ("main", 1, everything)]
    plan += [("head", 1, head), ("last", 0, last)]
    for stream, epoch, optimizer in plan:
        for rows in DRAWS.order(client, stream, epoch, len(own)).split(32):
            optimizer.zero_grad()
            x = federation.normalize(federation.x[own[rows]])
            x = x.contiguous(memory_format=torch.channels_last)
            F.cross_entropy(module(x), federation.y[own[rows]]).backward()
            optimizer.step()
    expected = {name: p.detach() for name, p in params.items()}
    for engine, near in ((LOOP, {}), ("batched", {"atol": 1e-4, "rtol": 1e-3})):
        states = record_states(Streams(), net, federation, [[client]], local=local, engine=engine)
        assert_close(dict(states[-1].server), expected, **near)


def scheduled(method, federation, net, local, engine="batched", capture=None):
    """Return the states after two of four rounds of a schedule."""
    runner = make_backend(as_engine(engine), net, CPU)
    if engine == "batched":
        runner._programs._capture = capture
    states, state = [], make_initial_state(method, net, federation.clients, CPU)
    for number in (1, 2):
        setup = RoundSetup(runner, method, federation, local.for_round(number, 4), 0)
        state, _ = play_round(setup, state, UNEVEN)
        states.append(tree.clone({"server": state.server, "clients": state.clients}))
    return states


@pytest.mark.parametrize("kind", keep_quick(["nesterov", "adam-decayed", "adamw"]))
@pytest.mark.parametrize("method", keep_quick([FedAvg(), FedSelect(p=0.5, lr_v=0.02)]))
def test_a_captured_step_takes_the_rate_of_its_round_and_none_is_captured_anew(
    method, kind, net, federation
):
    local, capture, steady = local_of(kind, decay=0.3, eps=0.1), Capture(), Capture()
    captured = scheduled(method, federation, net, local, capture=capture)
    assert_same(captured, scheduled(method, federation, net, local))
    loop = scheduled(method, federation, net, local, engine="loop")
    assert_close(captured, loop, atol=1e-5, rtol=1e-4)
    constant = dataclasses.replace(local, decay=1.0)
    scheduled(method, federation, net, constant, capture=steady)
    assert capture.captured == steady.captured


def cosine_in_steps(optimizer):
    return LambdaLR(optimizer, lambda past: 0.5 + 0.5 * math.cos(math.pi * (past - past % 3) / 10))


@pytest.mark.parametrize(
    ("values", "schedule"),
    [
        ({"decay": 0.9}, lambda o: ExponentialLR(o, 0.9)),
        ({"decay": 0.5, "decay_every": 3}, lambda o: StepLR(o, 3, 0.5)),
        ({"decay": "cosine"}, lambda o: CosineAnnealingLR(o, 10)),
        ({"decay": "cosine", "decay_every": 3}, cosine_in_steps),
    ],
)
def test_schedules_are_torchs(values, schedule):
    optimizer = SGD([torch.zeros(1)], lr=0.4)
    theirs, found = schedule(optimizer), []
    for _ in range(10):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    local = Local(1, 32, 0.4, **values)
    rates = [local.for_round(number, 10).lr for number in range(1, 11)]
    assert rates == pytest.approx(found, rel=1e-9)
    assert Local(1, 32, 0.4, decay=0.1).for_round(1000, 1000).lr > 0  # where a float would be 0


def test_batches_are_a_pure_function_of_their_key():
    draws = [DRAWS, Draws(1, "train", 1), Draws(0, "finetune", 1), Draws(0, "train", 2)]
    keys = [*((own, 3, "main", 0) for own in draws), (DRAWS, 4, "main", 0)]
    keys += [(DRAWS, 3, "second", 0), (DRAWS, 3, "main", 1)]
    orders = [tuple(own.order(*key, 50).tolist()) for own, *key in keys]
    assert len({*orders}) == len(keys)
    assert tuple(DRAWS.order(3, "main", 0, 50).tolist()) == orders[0]


def positions(samples, phase, epochs, fixed):
    federation = make_federation((samples,), (1,))
    return plan_steps(SampleSource(federation, 0, DRAWS, 8, fixed), phase, epochs).positions


def test_as_many_steps_as_epochs_have_are_these_epochs():
    for samples, count in ((24, 3), (26, 4), (25, 3), (5, 1)):
        epochs = positions(samples, Phase(1), range(3), None)
        assert_same(positions(samples, Phase(1), range(1), 3 * count), epochs)


@pytest.mark.parametrize("together", [1, 2])
def test_steps_run_on_from_pass_to_pass_and_from_phase_to_phase(together):
    whole = positions(37, phase := Phase(1, batches=together), range(9), None)
    parts = [positions(37, phase, own, 3) for own in (range(2), range(2, 3), range(3, 4))]
    assert_same(torch.cat(parts), whole[:12])


RANGES = """
local => steps=5 => steps must be null beside local.epochs=1; set local.epochs=null, got 5
local => nesterov=True => nesterov must be false but for sgd with momentum
local => decay=0.0 => decay must be above 0 and at most 1, or cosine
local => lr=0.0 => lr must be a positive number
engine => workers=-1 => workers must be 0 or more, got -1
stopping => lam=float("nan") => lam must be between 0 and 1
"""
SETTINGS = {
    "local": partial(Local, **{"epochs": 1, "batch_size": 32, "lr": 0.1}),
    "engine": Engine,
    "stopping": partial(Stopping, early=True),
}


@pytest.mark.parametrize(("group", "values", "message"), read_cases(RANGES))
def test_settings_out_of_range_are_named(group, values, message):
    with pytest.raises(ValueError, match=message):
        SETTINGS[group](**eval(f"dict({values})"))
