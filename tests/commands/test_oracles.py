"""Outside oracles: a right peer agrees, a wrong one does not. The peers themselves need a network."""

import csv
import sys

import pytest
import torch

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import oracles
from outside.problem import CLIENTS, LEARNING_RATE, Problem, find_largest_difference, name_entries


def play_fedavg(problem: Problem, epochs: int = 3) -> list[dict[str, torch.Tensor]]:
    """Return the global model of FedAvg after each of two rounds, by plain loops."""
    server = problem.make_network()
    played = []
    for _ in range(2):
        uploads = []
        for client in range(CLIENTS):
            network = problem.make_network()
            network.load_state_dict(server.state_dict())
            for images, labels in problem.batches(client) * epochs:
                loss = torch.nn.functional.cross_entropy(network(images), labels)
                gradients = torch.autograd.grad(loss, list(network.parameters()))
                for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                    parameter.data -= LEARNING_RATE * gradient
            uploads.append(list(network.parameters()))
        for parameter, *tensors in zip(server.parameters(), *uploads, strict=True):
            weighted = zip(problem.shares(), tensors, strict=True)
            parameter.data = sum(share * tensor.data for share, tensor in weighted)
        played.append(name_entries("server/", server))
    return played


def test_a_right_peer_agrees_and_a_wrong_one_differs(tmp_path):
    """Also one that is right but for a nan, or for one round."""
    problem = Problem(tmp_path)
    ours = problem.play("method=fedavg")
    right, wrong = play_fedavg(problem), play_fedavg(problem, epochs=2)
    assert find_largest_difference(ours, right) < oracles.LARGEST_ROUNDING
    assert find_largest_difference(ours, wrong) > 0.01
    right[1]["server/classifier.bias"][3] = torch.nan
    assert find_largest_difference(ours, right) == torch.inf
    with pytest.raises(ValueError, match="2 rounds, the peer 1"):
        find_largest_difference(ours, right[:1])
    with pytest.raises(KeyError, match="3/mystery"):
        find_largest_difference(ours, [{"3/mystery": torch.zeros(1)}] * 2)


def test_what_was_found_is_of_these_comparisons():
    """The file of results has all comparisons and no others, at the commits that are pinned."""
    with oracles.RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    named = {(row["method"], row["setting"], row["repository"], row["commit"]) for row in rows}
    listed = {
        (one.method, one.detail, one.repository, oracles.COMMITS[one.repository])
        for one in oracles.list_comparisons()
    }
    assert named == listed
    assert all(float(row["loop"]) <= oracles.LARGEST_ROUNDING for row in rows)
    assert oracles.make_table() in oracles.PAGE.read_text(), "run python scripts/oracles.py --page"
