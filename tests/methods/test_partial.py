"""FedRep, LG-FedAvg, FedBABU and FedBN: published sizes, which layers; what fine-tuning moves."""

import dataclasses
from functools import cache

import pytest

from fedpfl import models
from fedpfl.engine import FineTuning, make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.traffic import count_traffic
from fedpfl.methods import APFL, FedAvg, FedBABU, FedBN, FedRep, LGFedAvg
from tests.conftest import COHORTS, CPU, HEAD, LOCAL, LOOP, assert_same, differing, record_states


@pytest.fixture(scope="module")
def played(net, federation):
    """A round, computed once: nobody changes it."""
    return cache(lambda method: record_states(method, net, federation, COHORTS[:1]))


def test_published_sizes_of_what_lg_fedavg_and_fedrep_send():
    net = models.build_network("cnn4", (3, 32, 32), 10, 0)
    sent = {}
    for name, method in {
        "top": LGFedAvg(),
        "conv1": LGFedAvg(variant="as_published"),
        "fedrep": FedRep(),
        "fedbabu": FedBABU(),
    }.items():
        server, client = method.init(net.params, net.parts)
        sent[name] = int(count_traffic(method.download(server, client)).values)
    assert sent == {"top": 5_130, "conv1": 2_432, "fedrep": 873_408, "fedbabu": 873_408}


BODY = ("conv.weight", "conv.bias", "fc.weight", "fc.bias")
TUNED = [
    (FedAvg(), "head", HEAD),
    (FedBABU("body"), "all", BODY),
    (FedRep(), "all", HEAD),  # arXiv:2102.07078
    # Both models, and not the weight between them.
    (APFL(alpha_lr=1.0), "all", [f"{role}/{name}" for role in "wv" for name in (*BODY, *HEAD)]),
]


@pytest.mark.parametrize(("base", "part", "names"), TUNED, ids=str)
def test_fine_tuning_moves_what_the_paper_says(base, part, names, played, net, federation):
    """Seen through a method whose predictions are asked for after fine-tuning."""
    seen = []

    class Watched(type(base)):
        def predict(self, net, params, batch):
            if not net.training:
                seen.append(tree.map(lambda leaf: leaf.detach().clone(), params))
            return super().predict(net, params, batch)

    method = Watched(**dataclasses.asdict(base))
    state = played(base)[-1]
    kept, client = tree.clone(state.server), state.client(2)
    tuning = FineTuning(LOCAL, Draws(0, "finetune", 3), part)
    make_backend(LOOP, net, CPU).evaluate(EvalCall(method, federation, state, [2], tuning))
    moved = differing(seen[-1], method.personal(state.server, client))
    assert {path.strip("/") for path in moved} == {*names}
    assert_same(state.server, kept)


def test_fedbn_goes_by_type_and_leaves_group_normalisation_shared():
    batch, group = (
        models.build_network("resnet8", (1, 28, 28), 10, 0, norm=norm)
        for norm in ("batch", "group")
    )
    assert (
        len(FedBN()._personal(batch.parts)) == 2 * 9
    )  # seven in the blocks' paths and stem, two projections
    assert FedBN()._personal(group.parts) == ()
    assert group.parts.normalisation
