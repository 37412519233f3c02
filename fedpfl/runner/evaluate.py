"""All clients judged: by their personal models, and after fine-tuning where that is due."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fedpfl import engine
from fedpfl.config.plan import Run
from fedpfl.data import Federation
from fedpfl.engine.evaluate import accuracies, per_client, unsound
from fedpfl.engine.keys import Draws
from fedpfl.runner.faults import Diverged


class Judged(NamedTuple):
    """Hold an evaluation: columns of the row, accuracies by column and the client's number, lines for the user."""

    row: dict[str, float | None]
    clients: dict[str, dict[int, float]]
    notes: list[str]


def judge(run: Run, backend: engine.Backend, state: engine.State, alone: bool, last: bool) -> Judged:
    """Evaluate every client. Raises Diverged where a personal model is not finite.

    alone: whether the server sends nothing, so that a newcomer's model is the one that all began with. last: of the
    run's rounds, after which it fine-tunes whatever `eval.finetune_every`.
    """
    tunings: list[engine.Tuning | None] = [None]
    if run.eval.finetune_epochs and (state.round % run.eval.finetune_every == 0 or last):
        draws = Draws(run.settings.seed, "finetune", state.round)
        local = replace(run.local, epochs=run.eval.finetune_epochs, steps=None)
        tunings.append(engine.Tuning(local, draws, run.eval.finetune_part))
    judged = Judged({}, {}, [])
    for tuning in tunings:
        _judge(judged, run, backend, run.federation, state, tuning, {"test": "", "validation": "val_"})
    if run.unseen:
        if alone and state.round <= run.eval.every:
            judged.notes.append("nothing is sent to clients: newcomers are judged after fine-tuning alone")
        for tuning in tunings[1 if alone else 0 :]:
            _judge(judged, run, backend, run.unseen, newcomers(run, state), tuning, {"test": "unseen_"})
    return judged


def _judge(
    judged: Judged,
    run: Run,
    backend: engine.Backend,
    federation: Federation,
    state: engine.State,
    tuning: engine.Tuning | None,
    prefixes: dict[str, str],
) -> None:
    """Add what one federation's clients come to. prefixes: of the columns, by split."""
    everyone, when = list(range(federation.clients)), "ft_" if tuning else ""
    tallies = backend.judge(run.method, federation, state, everyone, tuning, looking(run, state))
    counts = {f"{prefix}{when}": tallies[split] for split, prefix in prefixes.items() if split in tallies}
    lost = [federation.number(client) for tally in counts.values() for client in unsound(tally)]
    if lost and not tuning:
        raise Diverged(f"training diverged: the model of client {lost[0]} is not finite; lower local.lr")
    for prefix, tally in counts.items():
        column = f"{prefix.removeprefix('unseen_')}accuracy"
        each = enumerate(per_client(tally))
        judged.clients.setdefault(column, {}).update({federation.number(client): value for client, value in each})
        if not lost:  # a mean over the others would flatter
            judged.row.update({f"{prefix}{name}": value for name, value in accuracies(tally).items()})
    if lost:
        note = f"fine-tuning diverged at {len({*lost})} of {len(everyone)} clients, client {lost[0]} the first"
        judged.notes.append(f"round {state.round}: {note}; its columns stay empty")


def newcomers(run: Run, state: engine.State) -> engine.State:
    """Return the state as clients meet it who have never taken part: the server's, and theirs from the beginning."""
    assert run.unseen
    fresh = engine.begin(run.method, run.net, run.unseen.clients, run.device, seed=run.settings.seed)
    return replace(state, rows=fresh.rows, members=state.rows)


def looking(run: Run, state: engine.State) -> engine.Tuning:
    """Return how methods look at training data in `before_evaluation`."""
    return engine.Tuning(run.local, Draws(run.settings.seed, "adapt", state.round))
