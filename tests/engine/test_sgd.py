"""The one training step against torch.optim.SGD, and the plan of batches."""

import pytest
import torch

from fedpfl.engine.keys import Draws
from fedpfl.engine.training.local import Local
from fedpfl.engine.training.sgd import Moments, as_float_mask, optimizer_step_
from fedpfl.engine.training.train_plan import with_epoch_numbers
from fedpfl.methods import Phase
from tests.conftest import assert_same

DRAWS = Draws(0, "train", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("local", [Local(1, 2, 0.1, 0.7, 0.1, clip=0.5), Local(1, 2, 0.1)], ids=str)
def test_bits_are_the_mask(local, dtype):
    layout = torch.channels_last
    params = torch.randn(3, 4, 2, 2, dtype=dtype).contiguous(memory_format=layout)
    grad, mask = torch.randn(3, 4, 2, 2, dtype=dtype), torch.rand(3, 4, 2, 2) < 0.5
    grad[0, 0, 0, 0], mask[0, 0, 0, 0] = -torch.inf, False
    ends = []
    for own in (mask, as_float_mask(mask, params)):
        leaf, velocity = params.clone(), torch.zeros_like(params)
        for _ in range(3):
            optimizer_step_([leaf], Moments({0: velocity}, {}, {}), [grad], [own], local)
        ends.append((leaf, velocity))
    assert_same(*ends)
    assert torch.equal(ends[0][0][~mask], params[~mask])
    assert not torch.equal(ends[0][0], params)


def test_gradients_handed_in_are_not_changed():
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (5,), (2, 2, 2)]
    params, grads = ([torch.randn(s, generator=generator) for s in shapes] for _ in range(2))
    before = [g.clone() for g in grads]
    for masks in ([None] * 3, [torch.ones_like(p, dtype=torch.bool) for p in params]):
        optimizer_step_(
            params,
            Moments({i: torch.zeros_like(p) for i, p in enumerate(params)}, {}, {}),
            grads,
            masks,
            Local(1, 2, 0.1, 0.7, 0.1),
        )
        assert_same(grads, before)


def test_batches_are_a_pure_function_of_their_key():
    def order(draws=DRAWS, client=3, stream="main", epoch=0):
        return draws.order(client, stream, epoch, 50).tolist()

    base = order()
    assert order() == base
    others = [
        order(Draws(1, "train", 1)),
        order(Draws(0, "finetune", 1)),
        order(Draws(0, "train", 2)),
        order(client=4),
        order(stream="second"),
        order(epoch=1),
    ]
    assert base not in others
    assert len({tuple(other) for other in others}) == len(others)


def test_epochs_count_up_per_stream_and_empty_phases_are_dropped():
    phases = [
        Phase(2),
        Phase(0),
        Phase(1, stream="head"),
        Phase(3),
        Phase(-1),
        Phase(2, stream="head"),
    ]
    plan = [(phase.stream, list(epochs)) for phase, epochs in with_epoch_numbers(phases)]
    assert plan == [("main", [0, 1]), ("head", [0]), ("main", [2, 3, 4]), ("head", [1, 2])]


def test_a_phase_has_values_of_its_own():
    local = Local(5, 32, 0.1, 0.7, 0.2)
    assert local.for_phase(Phase(1)) == local
    assert local.for_phase(Phase(1, sgd={"lr": 0.3, "momentum": 0.0})) == Local(
        5, 32, 0.3, 0.0, 0.2
    )
    with pytest.raises(ValueError, match="lr must be a positive number"):
        local.for_phase(Phase(1, sgd={"lr": -1.0}))
