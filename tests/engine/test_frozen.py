"""What holds still is computed once: a body while the head trains once a phase, a body that is
frozen for good once a run, a model that clients have in common once for all. What a sub-model lacks
is not computed. Nothing else changes: each client has the numbers that it has alone, and a sub-model
those that zeros around it would make.
"""

from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.data.augment import Augment
from fedpfl.engine import (
    Engine,
    FineTuning,
    RoundSetup,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.training import cutting, features
from fedpfl.engine.training.shared_model import find_shared_model
from fedpfl.ground import tree
from fedpfl.methods import METHODS, FedAvg, Phase
from fedpfl.methods.shared import neurons
from fedpfl.models import ADAPTERS, Net, build_network
from fedpfl.models.narrow import NarrowableConv2d
from fedpfl.models.subnetwork import find_subnetwork
from tests.conftest import (
    CPU,
    LOCAL,
    as_engine,
    assert_close,
    assert_same,
    evaluate,
    hold_out_quarter,
    keep_quick,
    make_federation,
    record_rounds,
    tiny,
)

COHORTS = [[0, 2, 4], [0, 1, 4]]
LONG = replace(LOCAL, epochs=3)
HEAD_TUNING = FineTuning(LONG, Draws(0, "finetune", 2), part="head")


def play(method, net, federation, tuning=None, workers=2, shortcuts=True):
    """Return what two rounds and an evaluation give, and how many samples the network saw."""
    backend = make_backend(Engine("loop", workers=workers, shortcuts=shortcuts), net, CPU)
    state = make_initial_state(method, net, federation.clients, CPU)
    setup = RoundSetup(backend, method, federation, LONG, 0)
    everybody = list(range(federation.clients))
    call = Net._call
    with mock.patch.object(Net, "_call", autospec=True, side_effect=call) as calls:
        for cohort in COHORTS:
            state, outcome = play_round(setup, state, cohort)
        counts = backend.evaluate(EvalCall(method, federation, state, everybody, tuning))
    clients = dict(enumerate(state.client(client) for client in everybody))
    result = {"server": state.server, "clients": clients, "loss": outcome.loss, "counts": counts}
    return result, sum(len(x) for (_, _, x), _ in calls.call_args_list)


# While the head trains


@dataclass(frozen=True)
class Curious(FedAvg):
    """Train the head, on more than the answers to a minibatch."""

    mixes_samples = ""

    def init(self, params, parts):
        marker = torch.zeros(())
        return {"model": params, "head": dict.fromkeys(parts.head, marker)}, {}

    def start(self, received, client):
        return received["model"]

    def phases(self, server, client, params, epochs):
        mask = {name: name in server["head"] for name in params}
        return [Phase(1, mask), Phase(1), Phase(1, mask)]

    def loss(self, server, client, net, params, batch):
        shifted = net.still()(params, batch.x + 0.1)
        doubled = {name: 2 * leaf for name, leaf in params.items()}
        other_body = net.still()(doubled, batch.x)
        _, features = net.still().features(params, batch.x)
        terms = shifted.square().mean() + other_body.square().mean() + features.square().mean()
        return batch.loss(net(params, batch.x)) + 0.1 * terms

    def finish(self, server, client, start, params):
        return {"model": params}, client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        return {**server, "model": tree.mean(uploads["model"], weight)}, clients


FLIP = Augment(flip=True)
STILL = [
    ("fedrep", True, None, True),
    ("curious", False, None, True),
    ("fedrep", False, FLIP, False),
    ("fedbabu", True, None, False),
    ("fedbabu", False, None, True),
    ("flute", False, None, True),
]
"""Method, with BatchNorm or not, views of samples, whether a body is computed once a phase."""


@pytest.mark.parametrize(("name", "norm", "augment", "is_once"), keep_quick(STILL, 4))
def test_heads_train_on_features_that_are_computed_once(name, norm, augment, is_once, federation):
    """But for new views of samples, and statistics that move; a loss may look at anything."""
    method = Curious() if name == "curious" else METHODS[name]()
    net, viewed = tiny(norm), replace(federation, augment=augment)
    result, count = play(method, net, viewed, HEAD_TUNING)
    expected, plain_count = play(method, net, viewed, HEAD_TUNING, shortcuts=False)
    assert (count < 0.95 * plain_count, count == plain_count) == (is_once, not is_once)
    assert_close(result, expected)


# For good


def make_net(model="mlp", **options):
    return build_network(model, (1, 8, 8), 5, 0, adapter=ADAPTERS["head"], **options)


@pytest.mark.parametrize(
    ("name", "model"),
    keep_quick([("ditto", "mlp"), ("fedper", "vit"), ("fedrod", "mlp"), ("fedavg", "mlp")], 2),
)
def test_each_sample_goes_through_the_body_once(name, model, federation):
    net = make_net(model, **({"layers": 1, "heads": 1, "width": 8} if model == "vit" else {}))
    result, count = play(METHODS[name](), net, federation)
    expected, plain_count = play(METHODS[name](), net, federation, shortcuts=False)
    assert_close(result, expected)
    if name != "fedrod":  # which reads what the body makes of samples itself
        trained = sum(len(federation.train[client]) for client in {0, 1, 2, 4})
        assert count == trained + sum(map(len, federation.test))
    assert count < plain_count / 2


def test_a_body_that_moves_or_keeps_statistics_has_no_store():
    for model, adapter in (("resnet8", "head"), ("vit", "lora"), ("mlp", "none")):
        net = build_network(model, (3, 32, 32), 5, 0, adapter=ADAPTERS[adapter])
        assert features.make_feature_store(net, CPU) is None


def test_other_samples_have_other_features(federation):
    store, net = features.FeatureStore(), make_net()
    brighter = replace(federation, x=torch.full_like(federation.x, 200))
    splits = [features.ClientSplit(data, "train", 0) for data in (federation, brighter)]
    first, second = (store.find_features(net, split) for split in splits)
    assert not torch.equal(first, second)
    assert torch.equal(store.find_features(net, splits[0]), first)


# Clients that have one model in common


SIZES = (3, 1, 0, 2, 600, 17, 40, 5, 18, 1, 256, 2, 2)
CLIENTS = list(range(len(SIZES)))
COHORT = [1, 3, 6]


@pytest.fixture(scope="module")
def various():
    """Clients of very different sizes, with validation samples and classes that do not count."""
    federation = hold_out_quarter(make_federation(tuple(8 + size % 9 for size in SIZES), SIZES))
    excluded = torch.arange(federation.classes) == torch.arange(len(SIZES))[:, None] % 4
    return replace(federation, excluded_classes=excluded)


def play_once(method, net, federation, engine="loop"):
    """Return a backend, and the state after a round of COHORT."""
    backend = make_backend(as_engine(engine), net, CPU)
    state = make_initial_state(method, net, federation.clients, CPU)
    setup = RoundSetup(backend, method, federation, LOCAL, 0)
    return backend, play_round(setup, state, COHORT)[0]


def evaluate_alone(backend, call):
    """Return the numbers of the call's clients, each evaluated alone."""
    alone = [backend.evaluate(replace(call, clients=[client])) for client in call.clients]
    return tree.map(lambda *leaves: torch.cat(leaves), *alone)


@pytest.mark.parametrize(
    ("name", "values", "others"),
    [
        ("fedavg", {}, []),
        ("fedper", {}, COHORT),
        ("fedobp", {"q": 0.5}, COHORT),
        ("fedavg", {"statistics": "local"}, COHORT),  # which tell those apart that took part
    ],
)
def test_each_client_has_its_numbers_of_being_alone(name, values, others, various):
    method, net = METHODS[name](**values), tiny(norm="statistics" in values)
    backend, state = play_once(method, net, various)
    everybody = various.merge_clients(4)
    call = EvalCall(method, various, state, CLIENTS[::-1], common_federation=everybody)
    assert find_shared_model(call, net).other_clients == others[::-1]
    together = backend.evaluate_splits(call)
    for row, client in enumerate(call.clients):
        alone = backend.evaluate_splits(replace(call, clients=[client]))
        assert find_shared_model(replace(call, clients=[client]), net) is None
        assert_same(alone, tree.take(together, slice(row, row + 1)))


@pytest.mark.parametrize("outputs", [1, 10])
def test_the_rows_of_its_products_are_alike_together_and_alone(outputs, various):
    first, last = nn.Linear(various.x[0].numel(), 512), nn.Linear(512, outputs)
    nn.init.normal_(last.weight)  # small outputs would hide a bit in the loss
    net = Net(nn.Sequential(nn.Flatten(), first, nn.ReLU(), last))
    labels = various.y.float() if outputs == 1 else various.y
    federation = replace(various, y=labels, excluded_classes=None)
    backend = make_backend(as_engine("loop"), net, CPU)
    state = make_initial_state(FedAvg(), net, len(SIZES), CPU)
    call = EvalCall(FedAvg(), federation, state, CLIENTS)
    assert_same(evaluate_alone(backend, call), backend.evaluate(call))


def test_many_clients_on_the_batched_backend_have_loops_numbers(net):
    federation = make_federation((4,) * 300, tuple(number % 7 for number in range(300)))
    backend, state = play_once(METHODS["fedper"](), net, federation)
    call = EvalCall(METHODS["fedper"](), federation, state, list(range(300)))
    batched = make_backend(as_engine("batched"), net, CPU)
    assert_close(batched.evaluate(call), backend.evaluate(call))


class _Curious(FedAvg):
    """Looks at the client's state in some way, which makes no difference here."""

    def personal(self, server, client):
        self._look(client)
        return server


def _look_bravely(client):
    try:
        return client["number"]
    except Exception:
        return None


LOOKS = {
    "reads": lambda client: client["trained"],
    "reads its number": lambda client: client["number"],
    "reads if there": _look_bravely,
    "unpacks": lambda client: {**client},
    "takes if any": lambda client: client or {},
}


def test_a_model_is_everybodys_only_where_the_client_is_not_looked_at_nor_fine_tuned(net, various):
    _, state = play_once(FedAvg(), net, various)
    call = EvalCall(FedAvg(), various, state, CLIENTS)
    assert find_shared_model(call, net).clients == CLIENTS
    for way, look in LOOKS.items():
        method_type = type("Curious", (_Curious,), {"_look": staticmethod(look)})
        curious = find_shared_model(replace(call, method=method_type()), net)
        # In the initial state all are alike but for their numbers.
        if way == "reads its number":
            assert curious is None
        assert curious is None or curious.other_clients == COHORT, way
    tuning = FineTuning(LOCAL, Draws(0, "finetune", 1))
    assert find_shared_model(replace(call, tuning=tuning), net) is None
    assert find_shared_model(replace(call, overlay={"x": torch.zeros(13)}), net) is None


# Sub-models


QUARTER = {"widths": (0.25,)}
CUT = [
    ("heterofl", {**QUARTER, "scaler": True}),
    ("prunefl", QUARTER),
    ("flexfl", {"levels": (0.1, 0.4, 1.0), "devices": (0, 1, 0)}),
    ("fedrolex", QUARTER),
    ("fjord", QUARTER),
    ("fjord", {**QUARTER, "ordered": True, "distill": 0.3}),
    ("subflot", {"rates": (0.75,)}),
    ("hermes", QUARTER),
    ("fedmp", QUARTER),
    ("random_dropout", {**QUARTER, "judge": "own"}),
]


@pytest.fixture(autouse=True)
def small_networks_are_cut(monkeypatch):
    """Have networks of any size evaluated without what they lack."""
    monkeypatch.setattr(cutting, "LEAST_EVALUATED", 0)


def play_submodels(method, net, federation, shortcuts=True):
    """Return the last state, all outcomes, and what evaluation says, of a few rounds."""
    engine = Engine("loop", shortcuts=shortcuts)
    states, outcomes = record_rounds(method, net, federation, COHORTS, engine=engine)
    judged = evaluate(method, net, federation, states[-1], engine=engine)
    return {"states": tree.map(torch.clone, states[-1].server), "judged": judged}, outcomes, states


def play_and_find_widths(method, net, federation):
    """Play, and return how many neurons the head read in each call of the network too."""
    with mock.patch.object(Net, "_call", autospec=True, side_effect=Net._call) as calls:
        played = play_submodels(method, net, federation)
    seen = (values for (_, values, _), _ in calls.call_args_list)
    return *played, {values["classifier.weight"].shape[1] for values in seen}


@pytest.mark.parametrize(("name", "values"), keep_quick(CUT, 3))
def test_a_submodel_is_what_zeros_around_it_would_make(name, values, federation):
    method, net = METHODS[name](**values), tiny(norm=True)
    result, outcomes, states, widths = play_and_find_widths(method, net, federation)
    whole, whole_outcomes, whole_states = play_submodels(method, net, federation, shortcuts=False)
    assert min(widths) < 12
    assert_close(result, whole, atol=2e-5, rtol=1e-4)
    for client in (0, 1, 2, 4):
        assert_close(states[-1].client(client), whole_states[-1].client(client), 2e-5, 1e-4)
    for outcome, whole_outcome in zip(outcomes, whole_outcomes, strict=True):
        assert_close(outcome.loss, whole_outcome.loss)
        assert outcome.traffic == whole_outcome.traffic


@dataclass(frozen=True)
class Unruly(Curious):
    """Train a few neurons of a model with zeros around them, and look at more than that.

    The loss pulls towards the whole server's answers and the states' values, reads features, and
    every statistic moves.
    """

    def init(self, params, parts):
        return {"model": params, "plan": neurons.build_plan(params, parts)}, {}

    def _mask(self, server, share=0.25):
        share = torch.tensor(share, dtype=torch.float64)
        active = neurons.prefix_neurons(server["plan"], share)
        return neurons.entry_masks(server["plan"], active, server["model"])

    def start(self, received, client):
        return tree.apply_mask(received["model"], self._mask(received))

    def phases(self, server, client, params, epochs):
        mask = self._mask(server)
        narrow = self._mask(server, 0.1)
        weights = {name: leaf if "weight" in name else False for name, leaf in narrow.items()}
        return [Phase(epochs, mask), Phase(1, weights, sgd={"lr": 0.02})]

    def loss(self, server, client, net, params, batch):
        teacher = net.aside(server["model"], batch.x).detach()
        still = net.still()(params, batch.x)
        _, features = net.features(params, batch.x)
        pull = tree.squared_distance(params, server["model"])
        distance = (net(params, batch.x) - teacher).square().mean()
        shape = features.square().mean() / features.shape[1]
        return batch.loss(still) + distance + shape + 1e-3 * pull

    def aggregate(self, server, clients, net, uploads, weight, generator):
        new, _ = super().aggregate(server, clients, net, uploads, weight, generator)
        model = tree.where(self._mask(server), new["model"], server["model"])
        return {**server, "model": model}, clients


@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_loss_of_a_submodel_may_look_at_all_of_the_network(momentum, federation):
    net = tiny(norm=True)
    net.module.norm.momentum = momentum
    result, _, states, widths = play_and_find_widths(Unruly(), net, federation)
    whole, _, whole_states = play_submodels(Unruly(), net, federation, shortcuts=False)
    assert {3, 12} <= widths
    assert_close(result, whole, atol=2e-5, rtol=1e-4)
    # Absent neurons have statistics too, and these move.
    statistics = states[-1].client(0)["statistics"]["main"]
    assert statistics["norm.running_var"][-1] != 1
    assert_close(statistics, whole_states[-1].client(0)["statistics"]["main"])


class Reader(nn.Module):
    """Two linear layers, with something between them."""

    def __init__(self, between, norm):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.norm = norm
        self.between = between
        self.classifier = nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.norm(self.fc(x.view(x.size(0), -1)))
        return self.classifier(self.between(self, x, hidden))


def divide_in_evaluation(net, x, hidden):
    return hidden if net.training else hidden / hidden.size(1)


def hook_layer():
    """Return a layer beside which something else is called."""
    layer = nn.Identity()
    layer.register_forward_hook(lambda layer, inputs, output: output / output.shape[1])
    return layer


INSTANCE_NORM = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
BETWEEN = {
    "batch": (lambda net, x, hidden: hidden.view(hidden.shape[0], -1), nn.Identity(), True),
    "size": (lambda net, x, hidden: hidden / hidden.size(1), nn.Identity(), False),
    "input": (lambda net, x, hidden: hidden * x, nn.Identity(), False),
    "mode": (divide_in_evaluation, nn.Identity(), False),
    "hook": (lambda net, x, hidden: hidden, hook_layer(), False),
    "layer norm": (lambda net, x, hidden: hidden, nn.LayerNorm(8), False),
    "instance norm": (lambda net, x, hidden: hidden, INSTANCE_NORM, False),
}
"""What tells how many neurons there are, or does not: with a layer, and whether it is cut."""


@pytest.mark.parametrize("name", BETWEEN)
def test_only_networks_of_separate_neurons_are_cut(name):
    between, norm, is_cut = BETWEEN[name]
    net = Net(Reader(between, norm))
    zeroed = tree.clone(net.params)
    zeroed["fc.weight"][2:] = zeroed["fc.bias"][2:] = zeroed["classifier.weight"][:, 2:] = 0
    if "norm.weight" in zeroed:
        zeroed["norm.weight"][2:] = zeroed["norm.bias"][2:] = 0
    still = dict.fromkeys(zeroed, False)
    assert (find_subnetwork(net, zeroed, still) is not None) == is_cut
    # Neither is a neuron cut that moves, or has an entry.
    moving = {**still, "fc.bias": torch.ones(8, dtype=torch.bool)}
    assert find_subnetwork(net, zeroed, moving) is None
    assert find_subnetwork(net, net.params, still) is None


@pytest.mark.parametrize(("stride", "padding", "bias"), [(1, 0, True), (2, 1, False)])
def test_a_product_of_few_channels_is_the_convolution(stride, padding, bias):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.requires_grad_()

    layer = NarrowableConv2d(6, 16, (3, 2), stride, padding, bias=bias)
    x, weight, shift = draw(5, 2, 7, 6), draw(3, 2, 3, 2), draw(3) if bias else None
    layer._parameters.update(weight=weight, bias=shift)
    inputs = [leaf for leaf in (x, weight, shift) if leaf is not None]

    def differentiate(outputs: Tensor) -> list[Tensor]:
        """Return the outputs, their gradient, and the gradient of its square."""
        grads = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), inputs)
        first = torch.autograd.grad(layer(x).square().sum(), inputs)
        return [outputs, *first, *grads, *second]

    expected = F.conv2d(x, weight, shift, stride, padding)
    assert layer(x).grad_fn.name() == "_ProductBackward"
    torch.testing.assert_close(differentiate(layer(x)), differentiate(expected))
