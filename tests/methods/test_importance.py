"""Scores, norms and the exact quantile rule, against exact arithmetic, numpy and the published
counts.
"""

import math
import random
from fractions import Fraction

import numpy as np
import torch
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from fedpfl import models
from fedpfl.methods.shared import importance
from tests.conftest import ROOT, assert_same

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


def test_constant_scores_are_zero_not_nan():
    scores = {"one": torch.tensor([3.0]), "many": torch.full((4,), 3.0)}
    assert_same(importance.rescale_scores(scores), {"one": torch.zeros(1), "many": torch.zeros(4)})


def test_scores_by_hand():
    model, server = {"a": torch.tensor([1.0, -2.0, 0.5])}, {"a": torch.tensor([0.0, 1.0, 0.5])}
    assert importance.obp_score(model, server)["a"].tolist() == [1.0, 9.0, 0.0]
    assert importance.published_obp_score(model, server)["a"].tolist() == [1.0, 6.0, 0.0]
    assert importance.movement_score(model, server)["a"].tolist() == [1.0, 3.0, 0.0]
