"""The calls that the engine makes of a backend, each about some clients of one run, and its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.keys import Draws, generator, track_global_draws
from fedpfl.engine.state import State
from fedpfl.engine.training.local import Local
from fedpfl.engine.training.train_plan import FineTuning
from fedpfl.ground import tree
from fedpfl.ground.records import Record
from fedpfl.ground.traffic import Traffic
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import Method, Turn


class Counts(NamedTuple):
    """Hold test results per client, `[clients]`.

    A named tuple, so that it is a tree of tensors: answers are stacked, moved and sent as trees.

    Attributes:
        correct: Number of correct predictions, of classes or next tokens; 0 in other tasks.
        loss: Summed loss of the task.
        total: Number of test samples, or of their tokens with task=next_token.
        measures: The measures that were asked for, as `measures.compute_measures` has them.
    """

    correct: Tensor
    loss: Tensor
    total: Tensor
    measures: Mapping[str, Tensor] = {}


class Participation(NamedTuple):
    """Hold the answers of a turn's clients, stacked in their order, `[clients, ...]`.

    A tree of tensors like Counts. It is always built by keyword.

    Attributes:
        uploads: What each client sends to the server.
        client_states: The states that clients keep, in init's form.
        trained: Whether a client has ever made a step.
        buffers: BatchNorm statistics after training, by model role.
        updated_buffers: Which statistics of a role each client updated, where the method says so.
        before: Evaluation before local training.
        after: Evaluation after local training.
        down: Traffic from the server to each client.
        up: Traffic from each client to the server.
        metrics: The method's own metrics.
        loss: Mean training loss over a client's steps.
        sample_loss: Mean training loss over the samples of these steps; 0 unless asked for.
        validation_loss: Mean loss of the trained model on validation samples (on test
            samples in a run without any); 0 unless asked for.
        client_ids: The clients that answered, all those of the call unless a node failed to.
        flops: FLOPs of each client's training for each of `TrainCall.flop_settings`, float64
            `[clients, settings]`.
    """

    uploads: Tree
    client_states: Entries
    trained: Tensor
    buffers: Entries
    updated_buffers: Entries
    before: Counts
    after: Counts
    down: Traffic
    up: Traffic
    metrics: dict[str, Tensor]
    loss: Tensor
    sample_loss: Tensor
    validation_loss: Tensor
    client_ids: Tensor
    flops: Tensor


@dataclass(frozen=True, eq=False)
class TrainCall:
    """Ask to prepare, train and finish clients, each evaluated before and after: a Participation.

    Attributes:
        clients: The clients of a turn, in the order of the answer's rows.
        local: How they train.
        draws: The random draws of this round.
        wants_stopping_loss: Whether the losses that early stopping goes by are asked for.
        survey: The turn, where it is no plain one: in a survey no client is evaluated, and
            perhaps none trains.
        overlay: What `Method.before_turn` returned for the clients, stacked in their order; None
            before it was called.
        flop_settings: Values of `local` for which the FLOPs of training are counted, even if
            no client trains.
    """

    method: Method
    federation: Federation
    state: State
    clients: list[int]
    local: Local
    draws: Draws
    wants_stopping_loss: bool = False
    survey: Turn | None = None
    overlay: Entries | None = None
    flop_settings: tuple[Local, ...] = ()


@dataclass(frozen=True, eq=False)
class EvalCall:
    """Ask to evaluate personal models on the clients' own samples, fine-tuned copies if asked.

    The answer is a dict of Counts by split: `test`, `validation` where the federation has
    validation samples, and `common` where `common_federation` is given; and `model`, a tree of the
    evaluated `params` and `buffers`, where `wants_models`.

    Attributes:
        tuning: How the models are fine-tuned; None evaluates them as they are.
        before_evaluation: Batch size and draws for methods with a hook of this name, which
            looks at training data.
        overlay: As in TrainCall.
        measures: Names of measures to compute for each client as well: of `measures.MEASURES`,
            `measures.SUMMED_MEASURES`, of those of plugins, or of `Task.measures`, or
            `measures.INTERVAL`.
        horizon: The time at which survival is judged.
        common_federation: Clients that lend their test samples to evaluate each model; counts
            are `[clients, clients of common_federation]`.
    """

    method: Method
    federation: Federation
    state: State
    clients: list[int]
    tuning: FineTuning | None = None
    before_evaluation: FineTuning | None = None
    overlay: Entries | None = None
    measures: tuple[str, ...] = ()
    common_federation: Federation | None = None
    wants_models: bool = False
    horizon: float | None = None

    @property
    def draws(self) -> Draws:
        """Return the random draws of `before_evaluation`."""
        if self.before_evaluation:
            return self.before_evaluation.draws
        return Draws(0, "adapt", self.state.round)


Call = TrainCall | EvalCall
AnyCall = TypeVar("AnyCall", bound=Call)
Answer = Participation | Record | Exception


def select_clients(call: AnyCall, positions: Sequence[int]) -> AnyCall:
    """Return the call about the clients at some positions."""
    overlay = call.overlay and tree.take(call.overlay, torch.tensor(positions))
    return replace(call, clients=[call.clients[i] for i in positions], overlay=overlay)


def group_by_kind(call: Call) -> dict[int, list[int]]:
    """Return the positions of a call's clients by the kind of their network."""
    positions: dict[int, list[int]] = {}
    for position, client in enumerate(call.clients):
        positions.setdefault(call.state.rows.kinds[client], []).append(position)
    return positions


def join_answers(call: Call, answers: Sequence[Any], order: Sequence[int]) -> Any:
    """Join answers about clients of several kinds, of what has one form in all.

    Args:
        call: About all of them.
        answers: One after another.
        order: The place of each of their rows in the joined answer.
    """
    if len(answers) == 1:
        return answers[0]
    if isinstance(call, TrainCall):
        answers = [keep_common(call.state, answer) for answer in answers]
    return tree.take(tree.concatenate_trees(answers), torch.tensor(order).argsort())


def keep_common(state: State, participation: Participation) -> Participation:
    """Return a participation without what only clients of one kind have."""
    rows = state.rows
    private_names = rows.initial["client"].keys() - rows.common["client"]
    private_roles = rows.initial["buffers"].keys() - rows.common["buffers"]
    return participation._replace(
        client_states=tree.drop(participation.client_states, private_names),
        buffers=tree.drop(participation.buffers, private_roles),
        updated_buffers=tree.drop(participation.updated_buffers, private_roles),
    )


def estimate_work(call: Call, client: int) -> float:
    """Estimate how long a client takes, in training samples; evaluating one takes a third."""
    train_samples = int(call.federation.train_sizes[client])
    evaluation_work = int(call.federation.test_sizes[client]) / 3
    if isinstance(call, TrainCall):
        local = call.local
    elif call.tuning:
        local = call.tuning.local
    else:
        return evaluation_work
    if local.epochs:
        return local.epochs * train_samples + evaluation_work
    return (local.steps or 0) * min(local.batch_size, train_samples) + evaluation_work


def with_before_turn(call: AnyCall) -> AnyCall:
    """Return the call with the overlay that `Method.before_turn` gives, unless it has one."""
    method = call.method
    state = call.state
    if call.overlay is not None or type(method).before_turn is Method.before_turn:
        return call
    seed = call.draws.seed
    purpose = call.draws.purpose
    round_number = call.draws.round
    tracking = track_global_draws(method, (seed, purpose, round_number, "before_turn", "process"))
    with tracking, torch.no_grad():
        clients = state.common(call.clients)
        # An evaluation draws nothing, so that it gives the same numbers however often it is asked.
        hook_generator = None
        if isinstance(call, TrainCall):
            hook_generator = generator(seed, purpose, round_number, "before_turn")
        overlay = method.before_turn(state.server, clients, state.others(), hook_generator)
        return replace(call, overlay=overlay)
