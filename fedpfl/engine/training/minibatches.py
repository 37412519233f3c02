"""Minibatches: which samples each step takes, in which order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.keys import Draws
from fedpfl.methods import Phase
from fedpfl.privacy import Steps


class SampleSource(NamedTuple):
    """Hold a client's samples, and how minibatches are made of them.

    Attributes:
        federation: Has the samples.
        client: Its number.
        draws: The orders of samples.
        batch_size: Of minibatches.
        fixed: How many steps take the place of an epoch, from one pass over the samples into the
            next.
        randoms: How many numbers each sample is given.
    """

    federation: Federation
    client: int
    draws: Draws
    batch_size: int
    fixed: int | None = None
    randoms: int = 0

    def draw_numbers(self, stream: str, epoch: int, rows: int, name: str = "random") -> Tensor:
        """Draw the numbers of an epoch's samples: their own, or those of their views."""
        count = self.federation.augment_numbers if name == "views" else self.randoms
        return self.draws.random(self.client, stream, epoch, rows, count, name)


class StepPlan(NamedTuple):
    """Plan the samples of one client's steps, in order.

    Attributes:
        positions: Of samples in its training data, `[steps, Phase.batches, batch]`; -1 behind those
            of a short minibatch.
        views: How each of them is augmented, uniform numbers `[steps, Phase.batches, batch,
            Federation.augment_numbers]`.
        random: The samples' own numbers, `[steps, Phase.batches, batch, Method.randoms]`.
    """

    positions: Tensor
    views: Tensor
    random: Tensor


def plan_steps(source: SampleSource, phase: Phase, epochs: range) -> StepPlan:
    """Deal a client's samples to a phase's steps, reshuffled each epoch.

    A last partial minibatch is kept, a lone sample not; minibatches that do not make a whole step
    are left out.
    """
    samples = len(source.federation.train[source.client])
    if source.draws.protection:
        return _draw_steps(source, phase.stream, epochs)
    steps_per_pass = _minibatches_per_epoch(samples, source.batch_size) // phase.batches
    # ---- A fixed number of steps may begin and end within a pass.
    taken_steps = slice(None)
    if source.fixed and steps_per_pass:
        first_step = source.fixed * epochs.start
        end_step = source.fixed * epochs.stop
        epochs = range(first_step // steps_per_pass, -(-end_step // steps_per_pass))
        offset = first_step % steps_per_pass
        taken_steps = slice(offset, offset + end_step - first_step)

    # ---- Samples in the order of each pass, how they are augmented, and their own numbers
    batch = min(source.batch_size, samples)
    slots = steps_per_pass * phase.batches * batch
    used_slots = min(samples, slots)
    positions = torch.full((len(epochs), slots), -1)
    views = torch.zeros(len(epochs), slots, source.federation.augment_numbers)
    random = torch.zeros(len(epochs), steps_per_pass, phase.batches, batch, source.randoms)
    for row, epoch in enumerate(epochs):
        order = source.draws.order(source.client, phase.stream, epoch, samples)[:used_slots]
        positions[row, :used_slots] = order
        if views.shape[-1]:
            numbers = source.draw_numbers(phase.stream, epoch, samples, "views")
            views[row, :used_slots] = numbers[order]
        # Those of all first samples are drawn first, then of all second ones.
        if source.randoms:
            numbers = source.draw_numbers(phase.stream, epoch, slots)
            by_slot = numbers.view(phase.batches, batch, steps_per_pass, source.randoms)
            random[row] = by_slot.permute(2, 0, 1, 3)
    shape = (len(epochs) * steps_per_pass, phase.batches, batch)
    return StepPlan(
        positions=positions.view(shape)[taken_steps],
        views=views.view((*shape, views.shape[-1]))[taken_steps],
        random=random.view((*shape, source.randoms))[taken_steps],
    )


def _minibatches_per_epoch(samples: int, batch_size: int) -> int:
    """Count the minibatches of an epoch; a lone last sample makes none."""
    return samples // batch_size + (samples % batch_size > 1)


def find_poisson_steps(batch_size: int, samples: int, fixed: int | None = None) -> Steps:
    """Plan a client's steps through an epoch of Poisson minibatches.

    There are as many steps as without protection, and `batch_size` samples in each on average.
    """
    count = _minibatches_per_epoch(samples, batch_size)
    if fixed and count:
        count = fixed
    return Steps(min(1.0, batch_size / max(1, samples)), count)


def _draw_steps(source: SampleSource, stream: str, epochs: range) -> StepPlan:
    """Plan steps as `plan_steps` does, each on a Poisson minibatch that is drawn in secret."""
    draws = source.draws
    assert draws.protection
    samples = len(source.federation.train[source.client])
    steps = find_poisson_steps(source.batch_size, samples, source.fixed)

    # ---- Which samples are in which minibatch; short ones are filled up with -1.
    minibatches: list[Tensor] = []
    for epoch in epochs:
        purpose = draws.purpose, draws.round, source.client, stream, epoch
        minibatches += draws.protection.draw_minibatches(samples, steps, purpose)
    batch = max([1, *map(len, minibatches)])
    positions = torch.full((len(minibatches), 1, batch), -1)
    for row, members in enumerate(minibatches):
        positions[row, 0, : len(members)] = members

    # ---- Numbers and views follow from the seed, as they tell nothing of samples.
    def draw_numbers(name: str) -> Tensor:
        rows = steps.number * samples
        numbers = torch.cat([source.draw_numbers(stream, epoch, rows, name) for epoch in epochs])
        by_sample = numbers.view(len(minibatches), samples, numbers.shape[-1])
        # Padding is -1, and takes those of sample 0.
        members = positions[:, 0].clamp(min=0)
        indices = members[:, :, None].expand(-1, -1, numbers.shape[-1])
        return by_sample.gather(1, indices)[:, None]

    return StepPlan(positions=positions, views=draw_numbers("views"), random=draw_numbers("random"))


def count_samples(
    phase: Phase, epochs: range, batch_size: int, samples: int, fixed: int | None = None
) -> int:
    """Count the samples that `plan_steps` deals, each as often as it is dealt.

    Args:
        phase: Of training.
        epochs: Their numbers.
        batch_size: Of minibatches.
        samples: How many the client has.
        fixed: As in `plan_steps`.
    """
    steps_per_pass = _minibatches_per_epoch(samples, batch_size) // phase.batches
    samples_per_step = phase.batches * min(batch_size, samples)
    samples_per_pass = min(samples, steps_per_pass * samples_per_step)
    if not fixed or not steps_per_pass:
        return len(epochs) * samples_per_pass

    def samples_before(step: int) -> int:
        passes, steps = divmod(step, steps_per_pass)
        return passes * samples_per_pass + steps * samples_per_step

    return samples_before(fixed * epochs.stop) - samples_before(fixed * epochs.start)
