"""The one training step against torch.optim.SGD, and the plan of batches."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedpfl.engine.keys import Draws, generator
from fedpfl.engine.training.sgd import (
    Local,
    Moments,
    as_bitmask,
    clients_without_trainable_entries,
    find_trainable_leaves,
    masked_moments,
    optimizer_step_,
    plan_steps,
    with_epoch_numbers,
)
from fedpfl.methods import Phase
from tests.conftest import assert_close, assert_same, make_federation

SETTINGS = list(itertools.product([0.0, 0.7], [0.0, 1e-2]))
DRAWS = Draws(0, "train", 1)


def problem(steps: int = 6) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    g = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (5,), (2, 2, 2)]
    return [torch.randn(s, generator=g) for s in shapes], [
        [torch.randn(s, generator=g) for s in shapes] for _ in range(steps)
    ]


def descend(local: Local, masks=None) -> list[torch.Tensor]:
    params, gradients = problem()
    velocity = [torch.zeros_like(p) for p in params]
    for grads in gradients:
        optimizer_step_(
            params,
            Moments(velocity),
            [g.clone() for g in grads],
            masks or [None] * len(params),
            local,
        )
    return params


@pytest.mark.parametrize(("momentum", "weight_decay"), SETTINGS)
def test_update_is_torch_optim_sgd_bit_for_bit(momentum, weight_decay):
    params, gradients = problem()
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=momentum, weight_decay=weight_decay)
    for grads in gradients:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    assert_same(descend(Local(1, 2, 0.1, momentum, weight_decay)), params)


@pytest.mark.parametrize(("momentum", "weight_decay"), SETTINGS)
def test_masked_entries_hold_still_and_the_others_move_as_ever(momentum, weight_decay):
    local = Local(1, 2, 0.1, momentum, weight_decay)
    start, _ = problem()
    masks = [torch.rand(p.shape, generator=torch.Generator().manual_seed(1)) < 0.5 for p in start]
    masks[1] = None
    free, masked = descend(local), descend(local, masks)
    for before, unmasked, after, mask in zip(start, free, masked, masks, strict=True):
        move = torch.ones_like(before, dtype=torch.bool) if mask is None else mask
        assert torch.equal(after[~move], before[~move])
        assert_close(after[move], unmasked[move])


def test_a_masked_entry_gathers_no_momentum():
    """It starts from rest when a later phase lets it go."""
    local, frozen = Local(1, 2, 1.0, momentum=0.5), torch.tensor([False, True])
    params, velocity, gradient = [torch.zeros(2)], [torch.zeros(2)], [torch.ones(2)]
    optimizer_step_(params, Moments(velocity), gradient, [frozen], local)
    optimizer_step_(params, Moments(velocity), gradient, [None], local)
    assert params[0].tolist() == [-1.0, -2.5]


@pytest.mark.parametrize("local", [Local(1, 2, 0.1, 0.7, 0.1, clip=0.5), Local(1, 2, 0.1)], ids=str)
def test_bits_are_the_mask(local):
    layout = torch.channels_last
    params = torch.randn(3, 4, 2, 2).contiguous(memory_format=layout)
    grad, mask = torch.randn(3, 4, 2, 2), torch.rand(3, 4, 2, 2) < 0.5
    grad[0, 0, 0, 0], mask[0, 0, 0, 0] = -torch.inf, False
    ends = []
    for own in (mask, as_bitmask(mask, params)):
        leaf, velocity = params.clone(), torch.zeros_like(params)
        for _ in range(3):
            optimizer_step_([leaf], Moments([velocity]), [grad], [own], local)
        ends.append((leaf, velocity))
    assert_same(*ends)
    assert torch.equal(ends[0][0][~mask], params[~mask])
    assert not torch.equal(ends[0][0], params)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_phases_of_different_masks_have_momentum_of_their_own(momentum):
    """As two optimisers with entries of their own that take turns, and a third one whose entries
    always move.
    """
    local, (params, gradients) = Local(1, 2, 0.1, momentum), problem(8)
    mask = torch.rand(params[0].shape, generator=torch.Generator().manual_seed(2)) < 0.5
    one, other, always = params[0].clone(), params[0].clone(), params[1].clone()
    optimizers = [torch.optim.SGD([p], lr=0.1, momentum=momentum) for p in (one, other, always)]
    velocity = [torch.zeros_like(p) for p in params[:2]]
    for phase in range(4):
        now = [mask if phase % 2 == 0 else ~mask, None]
        with masked_moments(Moments(velocity), now, local):
            for grads in gradients[2 * phase : 2 * phase + 2]:
                optimizer_step_(params[:2], Moments(velocity), grads[:2], now, local)
                one.grad = other.grad = grads[0]
                always.grad = grads[1]
                optimizers[phase % 2].step()
                optimizers[2].step()
    assert_same(params[0], torch.where(mask, one, other))
    assert_same(params[1], always)


def test_gradients_handed_in_are_not_changed():
    params, (grads, *_) = problem()
    before = [g.clone() for g in grads]
    for masks in ([None] * 3, [torch.ones_like(p, dtype=torch.bool) for p in params]):
        optimizer_step_(
            params,
            Moments([torch.zeros_like(p) for p in params]),
            grads,
            masks,
            Local(1, 2, 0.1, 0.7, 0.1),
        )
        assert_same(grads, before)


def dealt_to(samples, size, epochs, phase=Phase(1)):  # noqa: B008
    """The minibatches of one client's steps, without padding, which stands behind all else."""
    plan = plan_steps(
        phase, range(epochs), size, DRAWS, make_federation((samples,), (1,)), 0, randoms=3
    )
    padding = plan.positions < 0
    assert bool((padding[..., :-1] <= padding[..., 1:]).all())
    assert plan.random.shape == (*plan.positions.shape, 3)
    return [[rows[rows >= 0] for rows in step] for step in plan.positions]


@given(st.integers(0, 200), st.integers(2, 40), st.integers(1, 3))
def test_every_epoch_deals_all_samples_once_but_a_last_single_one(samples, size, epochs):
    dealt = [batch for step in dealt_to(samples, size, epochs) for batch in step]
    single = samples % size == 1
    per_epoch = samples // size + (samples % size > 1)
    assert len(dealt) == epochs * per_epoch
    for epoch in range(epochs):
        own = dealt[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert all(1 < len(batch) <= size for batch in own)
        assert all(len(batch) == size for batch in own[:-1])
        seen = torch.cat(own).tolist() if own else []
        assert len(set(seen)) == len(seen) == samples - single
        assert set(seen) <= set(range(samples))


@given(st.integers(0, 100), st.integers(2, 20), st.integers(1, 4))
def test_steps_of_several_minibatches_take_consecutive_ones_and_skip_what_is_left(
    samples, size, together
):
    single = [batch for step in dealt_to(samples, size, 2) for batch in step]
    taken = dealt_to(samples, size, 2, Phase(1, batches=together))
    per_epoch = len(single) // 2
    expected = [
        single[epoch * per_epoch + k * together : epoch * per_epoch + (k + 1) * together]
        for epoch in range(2)
        for k in range(per_epoch // together)
    ]
    assert_same(taken, expected)


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


def test_generators_do_not_touch_the_global_one():
    state = torch.get_rng_state()
    torch.rand(3, generator=generator(1, "train", 2))
    dealt_to(30, 8, 2)
    assert torch.equal(torch.get_rng_state(), state)


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


def test_movement_reads_masks():
    trained = {
        "w": {"a": torch.zeros(2), "b": torch.zeros(3)},
        "v": {"a": torch.zeros(2), "b": torch.zeros(3)},
    }
    elements = torch.tensor([True, False])
    assert find_trainable_leaves(Phase(1), trained).moving == [0, 1, 2, 3]
    assert find_trainable_leaves(Phase(1, {"w": True, "v": False}), trained).moving == [0, 1]
    mixed = find_trainable_leaves(
        Phase(1, {"w": {"a": elements, "b": False}, "v": {"a": True, "b": False}}), trained
    )
    assert mixed.moving == [0, 2]
    assert mixed.masks == [elements, None]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"epochs": 0}, "epochs must be 1 or more"),
        ({"batch_size": 1}, "batch_size must be 2 or more"),
        ({"lr": 0.0}, "lr must be a positive number"),
        ({"lr": float("nan")}, "lr must be a positive number"),
        ({"lr": float("inf")}, "lr must be a positive number"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"momentum": -0.1}, "momentum must be"),
        ({"weight_decay": -1.0}, "weight_decay must be 0 or more"),
    ],
)
def test_settings_out_of_range_are_named(change, named):
    with pytest.raises(ValueError, match=named):
        Local(**{"epochs": 1, "batch_size": 32, "lr": 0.1, **change})


def test_a_phase_has_values_of_its_own():
    local = Local(5, 32, 0.1, 0.7, 0.2)
    assert local.for_phase(Phase(1)) == local
    assert local.for_phase(Phase(1, sgd={"lr": 0.3, "momentum": 0.0})) == Local(
        5, 32, 0.3, 0.0, 0.2
    )
    with pytest.raises(ValueError, match="lr must be a positive number"):
        local.for_phase(Phase(1, sgd={"lr": -1.0}))


def test_who_leaves_a_phase_out():
    none, some = (
        torch.zeros(2, 3, dtype=torch.bool),
        torch.tensor([[False, False, False], [False, True, False]]),
    )
    assert clients_without_trainable_entries(Phase(1)) is None
    assert clients_without_trainable_entries(Phase(1, {"a": True, "b": none[0]})) is None
    assert bool(clients_without_trainable_entries(Phase(1, {"a": False, "b": none[0]})))
    assert bool(clients_without_trainable_entries(Phase(1, {"a": False})))
    assert not bool(clients_without_trainable_entries(Phase(1, {"a": some[1], "b": none[0]})))
    assert clients_without_trainable_entries(
        Phase(1, {"a": False, "b": some, "c": none}), 2
    ).tolist() == [True, False]
    assert clients_without_trainable_entries(Phase(1, False), 2).tolist() == [True, True]
