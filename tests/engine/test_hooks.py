"""Hooks beyond SGD on a loss, with methods made for them: looks at the data, records, steps, random
numbers, turns, phases; what clients are told, and the server finds out before a turn.
"""

import dataclasses
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fedpfl.data.augment import Augment
from fedpfl.engine import FineTuning, Local, make_backend, make_initial_state
from fedpfl.engine.backends import planning
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.sgd import clip_gradients
from fedpfl.ground import tree
from fedpfl.ground.errors import MethodError
from fedpfl.methods import Batch, FedAvg, Phase
from tests.conftest import (
    BACKENDS,
    CLASSES,
    COHORTS,
    CPU,
    HEAD,
    LOCAL,
    as_engine,
    assert_close,
    assert_same,
    client_row,
    differing,
    evaluate,
    hold_out_quarter,
    participate,
    record_rounds,
    take_part,
    tiny,
)

EVERYONE = list(range(10))


@dataclass(frozen=True)
class Blind(FedAvg):
    def predict(self, net, params, batch):
        assert (batch.y is None) != net.training
        return super().predict(net, params, batch)


def test_an_evaluation_shows_no_labels(backend, net, federation):
    """Neither in a round, nor between rounds, nor after fine-tuning, which sees them."""
    state, (outcome,) = record_rounds(Blind(), net, federation, COHORTS[:1], engine=backend)
    tuning = FineTuning(LOCAL, Draws(0, "finetune", 1))
    tuned = evaluate(Blind(), net, federation, state[-1], backend, tuning=tuning)
    assert int(tuned.correct.sum()) > 0
    assert int(outcome.after.correct.sum()) > 0


@dataclass(frozen=True)
class Noting(FedAvg):
    """Trains the body, keeps model and gradient as they are shown, and adds up what the loss keeps."""

    def init(self, params, parts):
        zeros = tree.map(torch.zeros_like, params)
        return params, {"sum": torch.zeros(()), "model": zeros, "gradient": zeros}

    def phases(self, server, client, params, epochs):
        mask = {name: name not in HEAD for name in params}
        return [Phase(epochs, mask, after_gradient=self._keep)]

    def loss(self, server, client, net, params, batch):
        return super().loss(server, client, net, params, batch), {"y": 1.0 + batch.y}

    def _keep(self, server, client, params, grads, batch, loss, kept):
        total = client["sum"] + batch.sum(kept["y"])
        return {**client, "sum": total, "model": params, "gradient": grads}


def test_the_look_at_the_gradient_is_ahead_of_the_step_and_sees_what_the_loss_leaves(
    backend, net, federation
):
    one_step = Local(None, 16, 0.05, steps=1)
    part = take_part(Noting(), net, federation, backend, local=one_step)
    for client in (0, 2, 4):
        seen, uploaded = (tree.take(own, client) for own in (part.client_states, part.uploads))
        assert_same(seen["model"], net.params)
        assert_close(uploaded, tree.map(lambda p, g: p - 0.05 * g, seen["model"], seen["gradient"]))
        assert {name for name, leaf in seen["gradient"].items() if not leaf.any()} == {*HEAD}
        order = Draws(0, "train", 1).order(client, "main", 0, len(federation.train[client]))
        labels = federation.y[federation.train[client][order[:16]]]
        assert seen["sum"] == (1 + labels).sum()


@dataclass(frozen=True)
class Returning(FedAvg):
    """Goes back to a model of the states where it is told so, and trains on from there."""

    goes_back: bool

    def init(self, params, parts):
        return params, {"model": params}

    def phases(self, server, client, params, epochs):
        training = Phase(1, stream="training")
        return [Phase(1, step=self._return), training] if self.goes_back else [training]

    def _return(self, server, client, net, params, batch):
        return client["model"], batch.loss(net(params, batch.x))


def test_a_step_may_go_back_to_a_model_of_the_states(backend, net, federation):
    back, never = (
        take_part(Returning(goes_back), net, federation, backend) for goes_back in (True, False)
    )
    assert_close(back.uploads, never.uploads)


@dataclass(frozen=True)
class Shaken(FedAvg):
    """Predicts by numbers and place of each sample; learns by the same."""

    randoms = 5

    def predict(self, net, params, batch):
        place = batch.indices[:, None] % 5 == torch.arange(5)
        return net(params, batch.x) + 2 * batch.random + place


def test_each_sample_has_numbers_and_a_place(net, federation, monkeypatch):
    """In training and fine-tuning alike on both backends; in evaluation a function of (seed, round,
    client, split), also of several passes.
    """
    monkeypatch.setattr(planning, "CHUNK", 8)
    held = dataclasses.replace(hold_out_quarter(federation), augment=Augment(flip=True))
    state = make_initial_state(Shaken(), net, 10, CPU)
    parts = [participate(Shaken(), net, held, state, EVERYONE, engine=own) for own in BACKENDS]
    assert_close(*(own._replace(before={}, after={}) for own in parts), atol=1e-5, rtol=1e-4)
    tuning, draws = FineTuning(LOCAL, Draws(0, "finetune", 0)), Draws(7, "adapt", 3)
    tuned = [evaluate(Shaken(), net, held, state, own, tuning=tuning) for own in BACKENDS]
    assert_close(*tuned, atol=1e-4, rtol=1e-4)
    for split, engine in itertools.product(("test", "validation"), BACKENDS):
        runner = make_backend(as_engine(engine), net, CPU)
        adapt = FineTuning(LOCAL, draws)
        call = EvalCall(Shaken(), held, state, EVERYONE, before_evaluation=adapt)
        told = runner.evaluate_splits(call)[split]
        for client in EVERYONE:
            own = getattr(held, split)[client]
            random = draws.random(client, split, 0, len(own), 5, "predict")
            batch = Batch(held.normalize(held.x[own]), None, None, random, torch.arange(len(own)))
            logits = Shaken().predict(net.bind({}), net.params, batch)
            assert int(told.correct[client]) == int((logits.argmax(1) == held.y[own]).sum())
            expected = torch.nn.functional.cross_entropy(logits, held.y[own], reduction="sum")
            assert_close(told.loss[client], expected, atol=1e-4, rtol=1e-5)


# Phases in which some have nothing that moves, statistics that hold still, clipped gradients


@dataclass(frozen=True)
class Sitting(FedAvg):
    """After its first phase one more, in which some clients move nothing."""

    who_moves: str = "odd"

    def init(self, params, parts):
        return params, {"seen": torch.zeros(())}

    def phases(self, server, client, params, epochs):
        first = Phase(1, after_gradient=self._observe)
        if self.who_moves == "nobody":
            return [first]
        moves = (client["number"] % 2 == 1) | (self.who_moves == "everyone")
        mask = tree.map(lambda leaf: torch.ones_like(leaf, dtype=torch.bool) & moves, params)
        return [first, Phase(1, mask, "other", after_gradient=self._observe)]

    def _observe(self, server, client, params, grads, batch, loss, kept):
        return {**client, "seen": client["seen"] + loss}


def test_a_phase_in_which_nothing_moves_leaves_no_trace(backend, federation):
    """Neither in losses and statistics of batch normalisation, nor in what is seen at gradients."""
    some, everyone, nobody = (
        take_part(Sitting(who), tiny(norm=True), federation, backend)
        for who in ("odd", "everyone", "nobody")
    )
    same = assert_same if backend == "loop" else assert_close
    for client in EVERYONE:
        for part in ("uploads", "client_states", "buffers", "loss", "after"):
            own, like = getattr(some, part), getattr(everyone if client % 2 else nobody, part)
            same(tree.take(own, client), tree.take(like, client))
    assert differing(everyone.client_states, nobody.client_states)


@dataclass(frozen=True)
class Careful(FedAvg):
    """A client moves the statistics of the channel of its own number alone, or none."""

    def updated_buffers(self, server, client):
        here = torch.arange(4) == client["number"]
        counter = torch.ones((), dtype=torch.bool)
        moments = dict.fromkeys(("norm.running_mean", "norm.running_var"), here)
        return {"main": {**moments, "norm.num_batches_tracked": counter}}


def test_statistics_at_the_server_are_averaged_over_those_who_updated_them(backend, federation):
    net, cohort, method = tiny(norm=True), [0, 1, 5], Careful()
    states, (outcome,) = record_rounds(method, net, federation, [cohort], engine=backend)
    part = participate(method, net, federation, states[0], cohort, engine=backend)
    for name in ("norm.running_mean", "norm.running_var"):
        old, new = states[0].server_buffers["main"][name], states[1].server_buffers["main"][name]
        own = part.buffers["main"][name]
        assert_close(new, torch.cat([own[0][:1], own[1][1:2], old[2:]]))
        assert_same(own[2], old)
    # Two channels' mean and variance
    assert outcome.traffic.values_up == 3 * tree.size(net.params) + 4


def test_clipping_is_torchs(backend, net, federation):
    local = dataclasses.replace(LOCAL, clip=0.05, epochs=1, batch_size=512)
    part = take_part(FedAvg(), net, federation, backend, local=local)
    for client in (0, 4, 6):
        module, own = net.copy().module.train(), federation.train[client]
        module.load_state_dict(net.params)
        optimizer = torch.optim.SGD(
            module.parameters(), local.lr, momentum=local.momentum, weight_decay=local.weight_decay
        )
        logits = module(federation.normalize(federation.x[own]))
        torch.nn.functional.cross_entropy(logits, federation.y[own]).backward()
        assert float(torch.nn.utils.clip_grad_norm_(module.parameters(), local.clip)) > local.clip
        optimizer.step()
        expected = {name: p.detach() for name, p in module.named_parameters()}
        assert_close(client_row(part.uploads, client), expected, atol=1e-6)


def test_small_gradients_and_held_entries_are_not_clipped():
    grads, mask = [torch.tensor([3.0, 4.0]), torch.tensor([100.0])], [None, torch.tensor([False])]
    assert_close(clip_gradients(grads, mask, 10.0, False)[0], torch.tensor([3.0, 4.0]))
    assert_close(clip_gradients(grads, mask, 1.0, False)[0], torch.tensor([0.6, 0.8]))
    rows = clip_gradients([torch.tensor([[3.0, 4.0], [0.3, 0.4]])], [None], 1.0, True)
    assert_close(rows[0], torch.tensor([[0.6, 0.8], [0.3, 0.4]]))


# What clients are told, and what the server finds out before a turn


@dataclass(frozen=True)
class Counting(FedAvg):
    """Each client keeps and shows the number that it is told."""

    def init(self, params, parts):
        assert (parts.clients, parts.classes) == (10, CLASSES)
        return params, {"told": torch.tensor(-1)}

    def finish(self, server, client, start, end):
        return end, {"told": client["number"]}

    def aggregate(self, server, clients, *rest):
        assert clients["number"].tolist() == clients["told"].tolist()
        assert not clients["newcomer"].any()
        return super().aggregate(server, clients, *rest)

    def personal(self, server, client):
        sign = torch.where(client["newcomer"], -1.0, 1.0)
        return tree.map(lambda leaf: leaf * 0 + sign * client["number"], server)


def test_every_hook_is_told_whom_it_is_about(backend, net, federation):
    states, _ = record_rounds(Counting(), net, federation, COHORTS[:1], engine=backend)
    told = [client if client in COHORTS[0] else -1 for client in EVERYONE]
    assert states[1].clients["told"].tolist() == told
    late = replace(
        states[1], rows=make_initial_state(Counting(), net, 10, CPU).rows, members=states[1].rows
    )
    known = late.client([0, 2])
    assert (known["number"].tolist(), known["newcomer"].tolist()) == ([10, 12], [True, True])
    assert float(Counting().personal(late.server, late.client(1))["fc.bias"][0]) == -11


@dataclass(frozen=True)
class Neighbours(FedAvg):
    """Each trains its own model, from the mean of it and that of the client after it, statistics
    included.
    """

    def init(self, params, parts):
        return {}, {"model": params}

    def buffers(self):
        return {"main": "local"}

    def before_turn(self, server, clients, others, generator):
        after = others([(int(number) + 1) % 10 for number in clients["number"]])
        pairs = ((own["model"], own["statistics"]) for own in (clients, after))
        mixed = [halfway(*pair) for pair in zip(*pairs, strict=True)]
        return {"mixed": mixed[0], "statistics": mixed[1]}

    def download(self, server, client):
        return client["mixed"]

    def finish(self, server, client, start, end):
        return {}, {"model": end}

    def aggregate(self, server, clients, *rest):
        return server, clients


def halfway(a, b):
    return tree.map(lambda one, other: (one + other) / 2 if one.is_floating_point() else one, a, b)


def test_the_server_is_asked_before_all_are_judged_too_and_of_newcomers(backend, federation):
    net, world = tiny(norm=True), federation.select_clients([0, 2, 4])
    state = record_rounds(Neighbours(), net, federation, COHORTS[:1], engine=backend)[0][-1]
    plain = make_initial_state(FedAvg(), net, 10, CPU)
    rows = make_initial_state(Neighbours(), net, 3, CPU).rows
    late = replace(state, rows=rows, members=state.rows)
    tuning = FineTuning(LOCAL, Draws(0, "finetune", 1))
    for own, who, tuned in ((state, federation, None), (late, world, None), (late, world, tuning)):
        judged = evaluate(Neighbours(), net, who, own, backend, tuning=tuned)
        for number in range(who.clients):
            mine = own.client(number)
            after = state.client((int(mine["number"]) + 1) % 10)
            params = halfway(mine["model"], after["model"])
            statistics = halfway(mine["statistics"], after["statistics"])
            one = replace(plain, server=params, server_buffers=statistics)
            alone = evaluate(FedAvg(), net, who, one, backend, [number], tuning=tuned)
            assert_close(tree.take(judged, number), tree.take(alone, 0), atol=2e-5, rtol=1e-4)


def test_statistics_of_another_form_are_refused(backend, federation):
    @dataclass(frozen=True)
    class Wrong(FedAvg):
        def before_training(self, server, client, net, shard):
            return {"statistics": {"main": {}}}

    state = make_initial_state(Wrong(), tiny(norm=True), 10, CPU)
    told = r"statistics were found in another form than the network's, main.*is missing"
    with pytest.raises(MethodError, match=told):
        participate(Wrong(), tiny(norm=True), federation, state, [0], engine=backend)


# Turns and phases without training


def test_a_trained_model_is_laid_out_as_one_never_trained(backend, net, federation):
    """Where an axis has one entry its stride may choose a convolution's kernel, and with it the
    last bits of a loss.
    """

    @dataclass(frozen=True)
    class Measured(FedAvg):
        def finish(self, server, client, start, end):
            trained, untrained = (map(Tensor.stride, tree.leaves(own)) for own in (end, net.params))
            assert [*trained] == [*untrained]
            return super().finish(server, client, start, end)

    assert 1 in net.params["conv.weight"].shape
    record_rounds(Measured(), net, federation, COHORTS[:1], engine=backend)
