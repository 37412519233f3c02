"""FedOBP with an adaptive q: its limits bit for bit, a choice by hand, what is refused."""

import pytest
import torch
from torch import nn

from fedpfl.config.plan import check_config
from fedpfl.config.run import build_run
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import Data, FedOBPAdaptive, Shard
from fedpfl.models import Net
from fedpfl.papers.fedobp.tables import is_paper_fedobp
from fedpfl.report.load import read_started_run
from tests.command import TINY, compose_once
from tests.conftest import assert_same
from tests.report.test_report import write_run


class Table(nn.Module):
    """Logits of the first unit vector are the weight's first column."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return self.classifier(x.flatten(1))


WEIGHT = "classifier.weight"
OWN, SHARED = torch.tensor([[3.0, 0.0], [0.0, 5.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
SHORT, ALL, NONE = 2 / 3, 0.0, 1.0
"""The scores are 9 and 25 on the diagonal and 1 beside it: ALL takes the whole diagonal, SHORT the
5 alone.
"""
A, B = (1.0, 0.0), (0.0, 1.0)


@pytest.mark.parametrize(
    ("several", "x", "y", "best"),
    [
        ((ALL, SHORT, NONE), (A, B), (0, 1), ALL),  # 2, 1 and 0 hits
        ((ALL, SHORT, NONE), (A, B), (1, 1), SHORT),  # 1, 2 and 1
        ((ALL, SHORT, NONE), (A, B), (1, 0), NONE),  # 0, 1 and 2
        ((ALL, NONE), (A, B), (1, 1), NONE),  # a hit each, with a loss of 2.1 and 1.6
        ((ALL, SHORT, NONE), ((1.0, 2.0),), (1,), SHORT),  # margins of 6 and 9, and a miss
        ((ALL, SHORT, NONE), (B,), (1,), SHORT),  # the same logits twice, and a miss
        ((ALL, SHORT, NONE), (), (), NONE),
    ],
)
def test_the_choice_is_the_one_made_by_hand(several, x, y, best):
    net, method = Net(Table()), FedOBPAdaptive(q=several)
    _, client = method.init({WEIGHT: OWN}, net.parts)
    client = {**client, "participated": torch.tensor(True)}
    assert client["q"] == several[-1]
    held = Data(torch.tensor(x).view(-1, 1, 1, 2), torch.tensor(y, dtype=torch.int64))

    def never():
        raise AssertionError("it looked at its training samples")

    shard = Shard(never, 32, lambda stream, epoch: never(), lambda: held)
    for hook in (method.before_training, method.before_evaluation):
        found = hook({WEIGHT: SHARED}, client, net.bind({}, training=True), shard)
        assert found.keys() == {"q"}
        assert (found["q"].item(), found["q"].dtype) == (best, torch.float64)
    entered = method.prepare({WEIGHT: SHARED}, client | found)
    diagonal = torch.tensor([[best == ALL, False], [False, best != NONE]])
    assert_same(entered["mask"][WEIGHT], diagonal)
    begun = method._begin({WEIGHT: SHARED}, entered)
    assert_same(begun[WEIGHT], torch.where(diagonal, OWN, SHARED))
    told = method.metrics({WEIGHT: SHARED}, entered)
    assert [told[f"q_share/{q}"].item() for q in several] == [float(q == best) for q in several]
    upload, kept = method.finish({WEIGHT: SHARED}, entered, {WEIGHT: SHARED}, {WEIGHT: OWN})
    assert upload["chosen"].tolist() == [q == best for q in several[1:]]
    assert kept["q"] == best


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("method.q=[]", "method.q must be one or more, ascending, got ()"),
        ("method.q=[0.5,0.5]", "method.q must be one or more, ascending"),
        ("method.q=[0.5,1.5]", "method.q must be between 0 and 1, got [0.5, 1.5]"),
        ("method.q=0.5", "method.q must be a list of numbers, got 0.5"),
        ("method.ema=0.3", "method.ema must be 0 with several q and score=obp, got 0.3"),
        ("norm=layer", "norm.name must be none or global with several q and score=obp, got"),
    ],
)
def test_lists_that_are_refused(values, message):
    with pytest.raises(FedpflError) as caught:
        check_config(compose_once("method=fedobp_adaptive", "validation=0.1", *values.split()))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("share", ["0", "0.001"])  # of the second nobody has a whole sample
def test_without_held_out_samples_it_is_refused(share):
    plan = check_config(compose_once(*TINY, "method=fedobp_adaptive", f"validation={share}"))
    told = (
        "^method=fedobp_adaptive chooses by held-out samples, and there are none; set validation="
    )
    with pytest.raises(FedpflError, match=told):
        build_run(plan)


def test_it_is_not_the_papers(tmp_path):
    method = {"score": "obp", "norm": "global"}
    for name, q in (("fedobp", 0.9), ("fedobp_adaptive", [0.5, 0.9])):
        write_run(tmp_path / name, {2: 90.0}, method={**method, "name": name, "q": q})
    one, other = (read_started_run(tmp_path / name) for name in ("fedobp", "fedobp_adaptive"))
    assert is_paper_fedobp(one)
    assert not is_paper_fedobp(other)
    assert other.q is None
