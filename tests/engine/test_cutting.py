"""Sub-models are computed at their true size, and give what zeros around them would."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.engine.backends import loop
from fedpfl.engine.training import cutting, evaluation
from fedpfl.ground import tree
from fedpfl.methods import METHODS, FedAvg, Phase
from fedpfl.methods.shared import neurons
from fedpfl.models import Net
from fedpfl.models.narrow import NarrowableConv2d
from fedpfl.models.subnetwork import find_subnetwork
from tests.conftest import assert_close, evaluate, keep_quick, record_rounds, tiny

QUARTER = {"widths": (0.25,)}
COHORTS = [[0, 2, 3], [0, 1, 3]]

CUT = [
    ("heterofl", {**QUARTER, "scaler": True}),
    ("random_dropout", {**QUARTER, "judge": "own"}),
    ("flexfl", {"levels": (0.1, 0.4, 1.0), "devices": (0, 1, 0)}),
    ("fedrolex", QUARTER),
    ("fjord", QUARTER),
    ("fjord", {**QUARTER, "ordered": True, "distill": 0.3}),
    ("subflot", {"rates": (0.75,)}),
    ("hermes", QUARTER),
    ("fedmp", QUARTER),
    ("prunefl", QUARTER),
]


@pytest.fixture(autouse=True)
def small_networks_are_cut(monkeypatch):
    """Have networks of any size evaluated without what they lack."""
    monkeypatch.setattr(cutting, "LEAST_EVALUATED", 0)


def play(method, net, federation):
    """Return the last state, all outcomes, and what evaluation says, of a few rounds."""
    states, outcomes = record_rounds(method, net, federation, COHORTS)
    judged = evaluate(method, net, federation, states[-1])
    return {"states": tree.map(torch.clone, states[-1].server), "judged": judged}, outcomes, states


def play_at_full_size(method, net, federation):
    """Return the same, computed with the zeros."""
    with (
        mock.patch.object(loop, "cut_job", return_value=None),
        mock.patch.object(evaluation, "bind_for_evaluation", lambda net, _, b: net.bind(b)),
    ):
        return play(method, net, federation)


def play_and_find_widths(method, net, federation):
    """Play, and return how many neurons the head read in each call of the network too."""
    with mock.patch.object(Net, "_call", autospec=True, side_effect=Net._call) as calls:
        played = play(method, net, federation)
    seen = (values for (_, values, _), _ in calls.call_args_list)
    return *played, {values["classifier.weight"].shape[1] for values in seen}


@pytest.mark.parametrize(("name", "values"), keep_quick(CUT, 3))
def test_a_submodel_is_what_zeros_around_it_would_make(name, values, federation):
    method, net = METHODS[name](**values), tiny(norm=True)
    result, outcomes, states, widths = play_and_find_widths(method, net, federation)
    whole, whole_outcomes, whole_states = play_at_full_size(method, net, federation)
    assert min(widths) < 12
    assert_close(result, whole, atol=2e-5, rtol=1e-4)
    for client in range(4):
        assert_close(states[-1].client(client), whole_states[-1].client(client), 2e-5, 1e-4)
    for outcome, whole_outcome in zip(outcomes, whole_outcomes, strict=True):
        assert_close(outcome.loss, whole_outcome.loss)
        assert outcome.traffic == whole_outcome.traffic


@dataclass(frozen=True)
class Unruly(FedAvg):
    """Train a few neurons of a model with zeros around them, and look at more than that.

    The loss pulls towards the whole server's answers and the states' values, reads features, and
    every statistic moves.
    """

    mixes_samples = ""

    def init(self, params, parts):
        return {"model": params, "plan": neurons.build_plan(params, parts)}, {}

    def _mask(self, server):
        share = torch.tensor(0.25, dtype=torch.float64)
        active = neurons.prefix_neurons(server["plan"], share)
        return neurons.entry_masks(server["plan"], active, server["model"])

    def start(self, received, client):
        return tree.apply_mask(received["model"], self._mask(received))

    def phases(self, server, client, params, epochs):
        mask = self._mask(server)
        weights = {name: leaf if "weight" in name else False for name, leaf in mask.items()}
        return [Phase(epochs, mask), Phase(1, weights, sgd={"lr": 0.02})]

    def loss(self, server, client, net, params, batch):
        teacher = net.aside(server["model"], batch.x).detach()
        still = net.still()(params, batch.x)
        _, features = net.features(params, batch.x)
        pull = tree.squared_distance(params, server["model"])
        distance = (net(params, batch.x) - teacher).square().mean()
        shape = features.square().mean() / features.shape[1]
        return batch.loss(still) + distance + shape + 1e-3 * pull

    def finish(self, server, client, start, params):
        return {"model": params}, client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        mean = tree.mean(uploads["model"], weight)
        return {**server, "model": tree.where(self._mask(server), mean, server["model"])}, clients

    def evaluated(self, server, client, params):
        return params


@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_loss_may_look_at_all_of_the_network(momentum, federation):
    net = tiny(norm=True)
    net.module.norm.momentum = momentum
    result, _, states, widths = play_and_find_widths(Unruly(), net, federation)
    whole, _, whole_states = play_at_full_size(Unruly(), net, federation)
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
    "width": (lambda net, x, hidden: hidden.view(-1, 8), nn.Identity(), False),
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
