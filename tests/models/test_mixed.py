"""Kinds of networks: their heads have one form, bodies are as they were; who has which; refusals."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedpfl.config.plan import check_config
from fedpfl.config.run import build_run
from fedpfl.ground.dealing import deal_choices
from fedpfl.models import MODELS, Mixed, build_kinds, build_network
from tests.command import TINY_TASK, compose_once
from tests.conftest import assert_same, read_cases
from tests.data.promises import one_line

SHAPE, CLASSES = (1, 8, 8), 5
build = partial(build_network, shape=SHAPE, classes=CLASSES, seed=3)


class Scaled(nn.Module):
    """Its logits are more than those of its head."""

    def __init__(self, shape, classes):
        super().__init__()
        self.fc = nn.Linear(64, classes)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.fc(x.flatten(1)) * self.scale


def make_kinds(*kinds, **options):
    return build_kinds(Mixed(kinds=kinds, **options), build)


def test_a_kind_is_its_network_with_features_of_one_width():
    """Of the width itself bit for bit; others are pooled, and their gradient reaches the body."""
    wide, narrow = {"name": "mlp", "hidden": [9, 6]}, {"name": "mlp", "hidden": [4]}
    kinds = make_kinds(wide, narrow, {"name": "mlp", "hidden": [13]})
    plain = [build("mlp", hidden=hidden) for hidden in ([9, 6], [4], [13])]
    x = torch.rand(7, *SHAPE)
    for net, own in zip(kinds, plain, strict=True):
        assert net.params["head.weight"].shape == (CLASSES, 6)
        assert (net.parts.head, net.parts.head_weight) == (
            ("head.weight", "head.bias"),
            "head.weight",
        )
        *_, weight, _ = own.params.values()
        body = [net.params[name] for name in net.parts.body]
        assert_same(dict(enumerate(body)), dict(enumerate([*own.params.values()][:-2])))
        (z,) = own.bind({}).features(own.params, x)[1:]
        if z.shape[1] == 6:
            assert torch.equal(net.params["head.weight"], weight)
            assert torch.equal(net.bind({})(net.params, x), own.bind({})(own.params, x))
        logits, features = net.bind({}).features(net.params, x)
        torch.testing.assert_close(features, F.adaptive_avg_pool1d(z, 6))
        torch.testing.assert_close(
            logits, F.linear(features, net.params["head.weight"], net.params["head.bias"])
        )
        grads, _ = net.bind({}).gradient(
            lambda net, p, x: net(p, x.x).exp().mean(), net.params, _Batch(x)
        )
        assert all(grads[name].abs().sum() > 0 for name in net.parts.body)


class _Batch:
    weight = None

    def __init__(self, x):
        self.x = x


def test_each_kind_knows_all_kinds_and_the_common_network():
    nets = make_kinds("mlp", {"name": "mlp", "hidden": [8]}, common={"name": "mlp", "hidden": [3]})
    own = build("mlp", hidden=[3])
    for number, net in enumerate(nets):
        copied = net.with_facts(rounds=7).copy()
        assert (copied.parts.kind, copied.parts.rounds, copied.name) == (number, 7, net.name)
        for known, one in zip(copied.parts.kinds, nets, strict=True):
            assert_same(known, one.params)
        assert copied.common is not net.common
        x = torch.rand(4, *SHAPE)
        bound, alone = copied.bind({}), own.bind({})
        assert torch.equal(bound.common(copied.parts.common, x), alone(own.params, x))
        assert bound.common.features(own.params, x)[1].shape == (4, 3)


def test_a_network_of_ones_own_is_a_kind_and_one_with_more_than_a_head_is_none(monkeypatch):
    class Own(nn.Sequential):
        def __init__(self, shape, classes):
            norm = nn.BatchNorm1d(10)
            super().__init__(nn.Flatten(), nn.Linear(64, 10), norm, nn.Linear(10, classes))
            self.register_buffer("mask", torch.ones(3))

    monkeypatch.setitem(MODELS, "own", Own)
    monkeypatch.setitem(MODELS, "scaled", Scaled)
    own, mlp = make_kinds("own", "mlp")
    assert {*own.buffers} == {
        f"body.2.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert {*own.constants} == {"body.mask"}
    assert (own.traits.trusted, mlp.traits.trusted, mlp.frozen["pool.weight"].shape) == (
        False,
        True,
        (10, 200),
    )
    assert "its head must be a linear layer with nothing behind it" in one_line(
        lambda: make_kinds("mlp", "scaled")
    )


LABELS = Mixed(kinds=("mlp", {"name": "mlp", "hidden": [3]}, "lenet5")).labels


@pytest.mark.parametrize(
    ("assign", "shares", "expected"),
    [
        ("cycle", None, [0, 1, 2, 0, 1, 2, 0, 1]),
        ("device", (2, 1, 1), [2, 0, 0, 1, 0, 0, 2, 1]),
        ({**dict.fromkeys("abcdef", "lenet5"), "g": "mlp_1", "h": "mlp_0"}, None, [2] * 6 + [1, 0]),
    ],
)
def test_kinds_go_round_or_by_speed_or_by_name(assign, shares, expected):
    speeds = [9.0, 1, 2, 5, 3, 4, 7, 6]
    assert deal_choices("model.assign", assign, LABELS, "abcdefgh", 0, speeds, shares) == expected


def test_random_kinds_have_their_shares_and_follow_the_seed():
    deal = partial(deal_choices, "model.assign", "random", "xy", ["c"] * 40)
    dealt = [deal(seed, [], (1.0, 3.0)) for seed in (1, 1, 2)]
    assert [kinds.count(0) for kinds in dealt] == [10, 10, 10]
    assert dealt[0] == dealt[1] != dealt[2]


REFUSED = """
method=fedavg => method=fedavg and model=mixed: it joins what clients of one network send, and these have several; use
method=flexlora adapter=lora adapter.layers=[linear] adapter.rank=[1,2] => method=flexlora and model=mixed: it joins
method=lg_fedavg method.layers=2 => method=lg_fedavg and model=mixed: the server's
model.kinds=[] => model.kinds must be one network or more
model.kinds=[cnn5] => model.kinds[0].name must be
model.kinds=[mlp,mixed] => model.kinds[1].name must be
model.kinds=[mlp,{name:mlp,depth:2}] => model.kinds[1].depth is not a key here
model.kinds=[mlp,{name:mlp,hidden:a}] => model.kinds[1].hidden must be
model.shares=[1,1] => model.shares must be a number for each kind, beside assign=random or device
model.assign=random model.shares=[1] => model.shares must be a number for each kind
model.assign=devices => model.assign must be
model.assign=device => model.assign=device goes by clients' devices; use system=simulated
model.assign={0:mlp} => model.assign must name one of mlp, lenet5 for each client, and has None for 1
model.weights=a.pt => model.weights must be null
model.common=resnet8 => model.common=resnet8 must be a plain network, without buffers (BatchNorm)
"""


@pytest.mark.parametrize(("words", "message"), read_cases(REFUSED))
def test_what_is_no_mixture_is_one_line(words, message):
    given = words.replace(" m", "|m").replace(" a", "|a").split("|")
    base = ["method=local_only", "model=mixed", "model.kinds=[mlp, lenet5]", *TINY_TASK]
    line = one_line(lambda: build_run(check_config(compose_once(*base, *given))))
    assert line.startswith(message), line
