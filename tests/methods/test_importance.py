"""Scores, norms and the exact quantile rule, against exact arithmetic, numpy and the published
counts.
"""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from fedpfl import models
from fedpfl.methods import FedOBP
from fedpfl.methods.shared import importance
from tests.conftest import ROOT, assert_close, assert_same, differing

SHAPES = {  # data set: image shape, classes, parameters
    "cifar10": ((3, 32, 32), 10, 878_538),
    "cifar100": ((3, 32, 32), 100, 924_708),
    "emnist": ((1, 28, 28), 62, 608_702),
    "svhn": ((3, 32, 32), 10, 878_538),
    "mnist": ((1, 28, 28), 10, 582_026),
    "fmnist": ((1, 28, 28), 10, 582_026),
    "organamnist": ((1, 28, 28), 11, 582_539),
    "organcmnist": ((1, 28, 28), 11, 582_539),
}
TABLE_II = {  # data set: q and personal entries at alpha 0.1, and at 0.5
    "cifar10": ((0.99998, 18), (0.99979, 185)),
    "cifar100": ((0.9998, 185), (0.99992, 74)),
    "emnist": ((0.995, 3044), (0.9991, 548)),
    "svhn": ((0.99997, 27), (0.9998, 176)),
    "mnist": ((0.9998, 117), (0.99993, 41)),
    "fmnist": ((0.99993, 41), (0.9999, 59)),
    "organamnist": ((0.9999, 53), (0.99995, 30)),
    "organcmnist": ((0.9997, 175), (0.99995, 30)),
}


def test_counts_of_table_ii_with_the_real_networks():
    """15 of 16. The sixteenth, MedMNIST A at alpha 0.1: the printed 53 belong to q = 0.99991,
    0.9999 gives 59.
    """
    matching = 0
    for name, columns in TABLE_II.items():
        shape, classes, parameters = SHAPES[name]
        n = sum(p.numel() for p in models.build_network("cnn4", shape, classes, 0).params.values())
        assert n == parameters
        for q, entries in columns:
            if (name, q) != ("organamnist", 0.9999):
                assert importance.personal_count(q, n) == entries, (name, q)
                matching += 1
    assert matching == 15
    assert importance.personal_count(0.9999, 582_539) == 59
    assert importance.personal_count(0.99991, 582_539) == 53


def test_configured_quantiles_are_those_of_table_ii():
    table = yaml.safe_load((ROOT / "conf/quantile/paper.yaml").read_text())["table"]
    assert table == {name: {0.1: low[0], 0.5: high[0]} for name, (low, high) in TABLE_II.items()}


def test_counts_of_section_v_d():
    """The paper's 263,561 and 87 follow the rule inf{x: F(x) >= q}, one below ours where both are
    not equal.
    """
    counts = [importance.personal_count(q, 878_538) for q in (0.1, 0.7, 0.9999)]
    assert counts == [790_684, 263_562, 88]
    assert (
        importance.personal_count(0.9, 878_538) == 87_854
    )  # printed under CIFAR100, whose count is the next
    assert importance.personal_count(0.9, 924_708) == 92_471


def test_counts_of_the_published_classifier_only_runs():
    assert importance.personal_count(0.9999, 878_538) == 88
    q_cls = 1 - (1 - 0.9999) * (878_538 - 1) / (5_130 - 1)
    assert round(q_cls, 3) == 0.983
    assert importance.personal_count(0.983, 5_130) == 88


def exact_rank(q: str, n: int) -> int:
    return math.floor(Fraction(q) * (n - 1))


def test_rank_is_exact_for_every_q_and_n():
    """Against fractions. A float32 rank fails from 2^20 on, one without snapping at q(n-1) =
    integer.
    """
    draw = random.Random(0)
    sizes = [
        *(1, 2, 3, 11, 101, 1001, 582_026, 878_538, 924_708),
        10**6 + 1,
        2**24 - 1,
        2**24 + 1,
        10**8 + 1,
    ]
    sizes += [draw.randrange(1, 2 * 10**8) for _ in range(200)]
    quantiles = [
        *("0", "1", "0.1", "0.3", "0.5", "0.7", "0.9", "0.99", "0.999", "0.9999", "0.99999"),
        "0.999999",
    ]
    quantiles += [f"0.{draw.randrange(10**6):06d}" for _ in range(100)]
    for n in sizes:
        for q in quantiles:
            assert importance.quantile_rank(float(q), n) == exact_rank(q, n), (q, n)
            assert importance.personal_count(float(q), n) == n - 1 - exact_rank(q, n)


@pytest.mark.full
def test_more_entries_than_float32_and_torch_quantile_can_count():
    n = 2**24 + 9
    mask = importance.mask_above_quantile(torch.arange(n, dtype=torch.float64), 0.9999)
    assert mask.sum() == importance.personal_count(0.9999, n)


finite = st.floats(0, 1e6, width=32, allow_subnormal=False)


@given(st.lists(finite, min_size=1, max_size=60), st.floats(0, 1))
def test_mask_equals_interpolated_quantile_then_greater(values, q):
    place = q * (len(values) - 1)
    assume(place == round(place) or abs(place - round(place)) > 1e-6)  # numpy does not snap
    scores = np.array(values, np.float64)
    expected = scores > np.quantile(scores, q, method="linear")
    assert (
        importance.mask_above_quantile(torch.tensor(values, dtype=torch.float32), q).tolist()
        == expected.tolist()
    )


@given(st.lists(st.integers(0, 5), min_size=1, max_size=80), st.integers(0, 1000))
def test_mask_with_ties_equals_numpy_and_never_exceeds_the_count(values, thousandths):
    n, q = len(values), thousandths / 1000
    place = Fraction(thousandths, 1000) * (n - 1)
    low = sorted(values)[math.floor(place)]
    mask = importance.mask_above_quantile(torch.tensor(values).float(), q)
    assert mask.tolist() == [value > low for value in values]
    assert mask.sum() <= importance.personal_count(q, n)


def test_both_ways_of_selecting_agree_with_sorting():
    """The few largest are found by topk, the others by kthvalue."""
    scores = torch.rand(1001, generator=torch.Generator().manual_seed(0)).round(
        decimals=2
    )  # with ties
    for thousandths in range(0, 1001, 7):
        assert (
            importance.order_statistic(scores, thousandths / 1000)
            == scores.sort().values[thousandths]
        )


def test_norms_on_two_tensors():
    """Scores [0, 1, 2] and [0, 10, 20] at q = 0.5."""
    scores = {"a": torch.tensor([0.0, 1, 2]), "b": torch.tensor([0.0, 10, 20])}
    raw = {"a": torch.tensor([False, False, True]), "b": torch.tensor([False, True, True])}
    assert_same(importance.mask_above_quantile(scores, 0.5, "none"), raw)
    assert_same(importance.mask_above_quantile(scores, 0.5, "global"), raw)
    layer = {"a": torch.tensor([False, False, True]), "b": torch.tensor([False, False, True])}
    assert_same(importance.mask_above_quantile(scores, 0.5, "layer"), layer)


def test_global_norm_gives_the_raw_mask_even_where_rounding_would_merge_scores():
    scores = {"a": torch.tensor([1e-12, 2e-12, 3e-12, 1.0]), "b": torch.rand(50) * 1e-9 + 0.5}
    for q in np.linspace(0, 1, 40):
        none, whole = (
            importance.mask_above_quantile(scores, float(q), norm) for norm in ("none", "global")
        )
        assert_same(none, whole)


def test_layer_normalisation_is_per_tensor():
    scores = {"a": torch.tensor([2.0, 4, 6]), "b": torch.tensor([[0.0, 30], [20, 40]])}
    expected = {"a": torch.tensor([0.0, 0.5, 1]), "b": torch.tensor([[0, 0.75], [0.5, 1]])}
    assert_close(importance.rescale_scores(scores), expected)


def test_constant_scores_are_zero_not_nan():
    scores = {"one": torch.tensor([3.0]), "many": torch.full((4,), 3.0)}
    assert_same(importance.rescale_scores(scores), {"one": torch.zeros(1), "many": torch.zeros(4)})


def test_scores_by_hand():
    model, server = {"a": torch.tensor([1.0, -2.0, 0.5])}, {"a": torch.tensor([0.0, 1.0, 0.5])}
    assert importance.obp_score(model, server)["a"].tolist() == [1.0, 9.0, 0.0]
    assert importance.published_obp_score(model, server)["a"].tolist() == [1.0, 6.0, 0.0]
    assert importance.movement_score(model, server)["a"].tolist() == [1.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("values", "same"), [({}, False), ({"scope": "tensor"}, True), ({"norm": "layer"}, True)]
)
def test_what_is_personal_of_a_low_rank_pair_depends_on_its_scale_unless_tensors_are_apart(
    values, same
):
    """(cA, B/c) is the same network."""
    g = torch.Generator().manual_seed(0)
    own, shared = (
        {"A": torch.randn(2, 9, generator=g), "B": torch.randn(7, 2, generator=g)} for _ in range(2)
    )
    method, masks = FedOBP(q=0.7, **values), []
    for c in (1.0, 4.0):
        model, server = ({"A": c * pair["A"], "B": pair["B"] / c} for pair in (own, shared))
        masks.append(
            method.prepare(server, {"model": model, "participated": torch.tensor(True)})["mask"]
        )
    assert (differing(*masks) == []) == same
