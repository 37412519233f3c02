"""How much of clients a method's server goes by: its hooks are called with wrong values in the rest."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedpfl.engine.keys import Draws, generator
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import FACTS, SEES, Turn
from fedpfl.testing.promises import Unkept
from fedpfl.testing.toy import COHORTS, EVERYONE, MethodTrial, require_close


@cache
def find_server_view(trial: MethodTrial) -> tuple[str, str]:
    """Return one of SEES for a method's server, and the hook that shows it."""
    mean, single_uploads, client_states = SEES
    # From the most that a server may see to the least, so that the first sign decides.
    hook = _find_hook_that_reads_states(trial)
    if hook:
        return client_states, hook
    hook = _find_hook_that_reads_uploads(trial)
    if hook:
        return single_uploads, hook
    return mean, ""


def _find_hook_that_reads_states(trial: MethodTrial) -> str:
    """Return the server's hook that answers otherwise where clients' states are spoilt, or ""."""
    method = trial.method
    cohort = COHORTS[1]
    state = trial.play_cohorts("loop")[0][1]
    client_states = state.client(cohort)
    read_others = state.others()

    # ---- Step 1: what the server may read: facts, and what it gave to clients in the beginning.
    public_entries = set(FACTS) - {"statistics"}
    for name, initial_rows in method.init_clients(len(EVERYONE), generator(0, "endow")).items():
        if _is_near(tree.take(initial_rows, torch.tensor(cohort)), client_states[name]):
            public_entries.add(name)

    # ---- Step 2: `before_turn` with all other entries spoilt.
    def call_before_turn(stacked: dict[str, Tree], read_rows: Any) -> dict[str, Tree]:
        hook_generator = generator(0, "train", 2, "before_turn")
        return method.before_turn(state.server, stacked, read_rows, hook_generator)

    def read_spoilt_others(numbers: Any) -> dict[str, Tree]:
        return _spoil(read_others(numbers), public_entries)

    overlay = call_before_turn(client_states, read_others)
    spoilt_states = _spoil(client_states, public_entries)
    if not _answers_alike(overlay, call_before_turn, spoilt_states, read_spoilt_others):
        return "before_turn"

    # ---- Step 3: `download` of each client.
    def download(client: dict[str, Tree]) -> Tree:
        return method.download(
            state.server,
            method.prepare(state.server, client),
        )

    for number in cohort:
        job = trial.find_job(trial.net(), state, number)
        client = {**job.client, "statistics": job.buffers}
        sampled_entries = method.sample(state.server, Draws(0, "train", 2).server(number))
        spoilt_client = _spoil(client, {*public_entries, *overlay, *sampled_entries})
        if not _answers_alike(download(client), download, spoilt_client):
            return "download"

    # ---- Step 4: the server that `aggregate` returns.
    aggregate, clients, uploads = _second_aggregation(trial)

    def aggregate_server(clients: dict[str, Tree]) -> Tree:
        return aggregate(clients, uploads)[0]

    spoilt_clients = _spoil(clients, public_entries)
    if not _answers_alike(aggregate_server(clients), aggregate_server, spoilt_clients):
        return "aggregate"
    return ""


def _find_hook_that_reads_uploads(trial: MethodTrial) -> str:
    """Return the server's hook that goes by more than a mean of uploads, or ""."""
    # ---- Step 1: turns that are not the cohort at once.
    for round_index, cohort in enumerate(COHORTS):
        turns_generator = generator(0, "turns", round_index + 1)
        turns = trial.method.turns(
            round_index,
            cohort,
            len(EVERYONE),
            turns_generator,
        )
        # A survey, or turns of fewer clients, lets the server look at single ones.
        if turns != [Turn(cohort)]:
            return "turns"
    aggregate, clients, uploads = _second_aggregation(trial)

    # ---- Step 2: an aggregation of means in place of uploads.
    answer = aggregate(clients, uploads)
    _, updated_entries = answer

    def average(leaf: Tensor) -> Tensor:
        # Flags and counts have no mean; all get the first client's.
        row = leaf.mean(0, keepdim=True) if leaf.is_floating_point() else leaf[:1]
        return row.expand_as(leaf).clone()

    if not _is_near(updated_entries, {name: clients[name] for name in updated_entries}):
        return "aggregate"
    if not _answers_alike(answer, aggregate, clients, tree.map(average, uploads)):
        return "aggregate"
    return ""


def _second_aggregation(trial: MethodTrial) -> tuple[Callable[..., Any], dict[str, Tree], Tree]:
    """Return the second round's `aggregate` at equal weights, and its states and uploads."""
    cohort = COHORTS[1]
    state = trial.play_cohorts("loop")[0][1]
    participation = trial.train_part("loop", state, cohort, cohort)
    facts = {
        **state.facts(cohort),
        "trained": participation.trained,
        "statistics": participation.buffers,
    }
    net = trial.net().bind(state.server_buffers)
    # At equal weights a mean in the place of each upload changes no mean of theirs.
    weight = torch.full((len(cohort),), 1 / len(cohort))

    def aggregate(clients: dict[str, Tree], uploads: Tree) -> Any:
        hook_generator = generator(0, "aggregate", 2)
        return trial.method.aggregate(
            state.server,
            clients,
            net,
            uploads,
            weight,
            hook_generator,
        )

    return aggregate, {**participation.client_states, **facts}, participation.uploads


def _spoil(clients: dict[str, Tree], public_entries: set[str]) -> dict[str, Tree]:
    """Return states with nan and other wrong values in all entries but the public ones."""

    def spoil(leaf: Tensor) -> Tensor:
        # Bools and whole numbers have no nan.
        return torch.full_like(leaf, torch.nan) if leaf.is_floating_point() else ~leaf

    spoilt = dict(clients)
    for name in clients.keys() - public_entries:
        spoilt[name] = tree.map(spoil, clients[name])
    return spoilt


def _answers_alike(expected: Any, hook: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether a hook answers as expected, but for rounding."""
    try:
        return _is_near(expected, hook(*arguments))
    except Exception:  # whatever wrong values lead to
        return False


def _is_near(expected: Any, answer: Any) -> bool:
    try:
        require_close("", expected, answer, atol=1e-6, rtol=1e-4)
    except Unkept:
        return False
    return True
