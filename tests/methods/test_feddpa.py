"""FedDPA (Yang, Huang and Ye, NeurIPS 2023): equal scores, and what the rounds tell."""

import torch

from fedpfl.methods import FedDPA
from tests.conftest import record_rounds, record_states

JOINT = {"rule": "quantile", "train": "joint"}


def test_a_tensor_of_equal_scores_is_shared(net, federation):
    method = FedDPA()
    state = record_states(method, net, federation)[-1]
    client = state.client(2)
    equal = {**client["score"], "fc.bias": torch.full((12,), 0.3)}
    mask = method.prepare(state.server, {**client, "score": equal})["mask"]
    assert not mask["fc.bias"].any()


def test_personal_is_the_mean_number_of_personal_entries_in_the_cohort(backend, net, federation):
    """By the quantile 0.4 a tensor of n has n - 1 - floor(0.4 (n - 1)) of them; who never trained
    has none.
    """
    count = sum(leaf.numel() - 1 - int(0.4 * (leaf.numel() - 1)) for leaf in net.params.values())
    _, outcomes = record_rounds(
        FedDPA(**JOINT), net, federation, [[0, 2], [0, 2], [0, 2, 4, 6]], engine=backend
    )
    assert [outcome.metrics for outcome in outcomes] == [
        {"personal": value} for value in (0, count, count / 2)
    ]
