"""IFCA (arXiv:2006.04088): initial models, models that broke, statistics."""

from dataclasses import dataclass

import torch

from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import IFCA
from tests.conftest import CPU, assert_same, find_eval_job, record_states, tiny


@dataclass(frozen=True)
class Equal(IFCA):
    """All models begin as the first."""

    def init(self, params, parts):
        server, client = super().init(params, parts)
        return {**server, "models": tree.repeat(params, self.clusters)}, client


def test_models_begin_with_the_same_numbers_in_another_order(net):
    models = make_initial_state(IFCA(clusters=3), net, 10, CPU).server["models"]
    assert_same(tree.take(models, 0), net.params)
    for name, leaf in models.items():
        flat = leaf.flatten(1)
        assert torch.equal(flat.sort(1).values, flat[:1].sort(1).values.expand(3, -1))
        assert (flat[0] != flat[1]).any()
        assert (flat[1] != flat[2]).any()
        assert name in net.params
    assert_same(
        make_initial_state(IFCA(clusters=4), net, 10, CPU).server["models"]["fc.weight"][:3],
        models["fc.weight"],
    )


def test_a_model_without_a_finite_loss_is_nobodys(net, federation):
    state = make_initial_state(IFCA(clusters=3), net, 10, CPU)
    for broken in (0, 1):
        state.server["models"]["fc.bias"][broken] = torch.nan
    assert_same(
        find_eval_job(IFCA(clusters=3), net, federation, state, 0).params,
        tree.take(state.server["models"], 2),
    )


def test_a_model_is_judged_by_its_own_statistics(federation):
    """Of equal models that whose statistics fit is taken."""
    method, net = Equal(), tiny(norm=True)
    trained = record_states(Equal(clusters=1), net, federation, [[0, 2, 4]] * 3)[-1].server
    for fits in (0, 1):
        state = make_initial_state(method, net, 10, CPU)
        state.server["models"].update(
            tree.map(lambda leaf: leaf.repeat(2, *[1] * (leaf.dim() - 1)), trained["models"])
        )
        wrong = state.server["statistics"]["norm.running_var"]
        wrong[1 - fits] = 1e6
        job = find_eval_job(method, net, federation, state, 4)
        assert_same(job.buffers["main"], tree.take(state.server["statistics"], fits))
