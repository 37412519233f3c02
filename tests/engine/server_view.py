"""How much of clients a method's server goes by: its hooks are called with wrong values in the rest."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedpfl.engine.keys import Draws, generator
from fedpfl.ground import tree
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import FACTS, SEES, Turn
from fedpfl.testing.promises import Unkept
from fedpfl.testing.toy import COHORTS, EVERYONE, MethodTrial, require_close

COHORT = COHORTS[1]


@cache
def find_server_view(trial: MethodTrial) -> tuple[str, str]:
    """Return one of SEES for a method's server, and the hook that shows it."""
    mean, single_uploads, client_states = SEES
    # From the most that a server may see to the least, so that the first sign decides.
    hook = _find_hook_that_reads_states(trial)
    if hook:
        return client_states, hook
    hook = _find_hook_that_reads_uploads(trial)
    return (single_uploads, hook) if hook else (mean, "")


def _find_hook_that_reads_states(trial: MethodTrial) -> str:
    """Return the server's hook that answers otherwise where clients' states are spoilt, or ""."""
    method = trial.method
    state = trial.play_cohorts("loop")[0][1]
    clients, read_others = state.client(COHORT), state.others()

    # ---- Step 1: what the server may read: facts, and what it gave to clients in the beginning.
    public = set(FACTS) - {"statistics"}
    for name, rows in method.init_clients(len(EVERYONE), generator(0, "endow")).items():
        if _is_near(tree.take(rows, torch.tensor(COHORT)), clients[name]):
            public.add(name)

    # ---- Step 2: `before_turn` with all other entries spoilt.
    def call_before_turn(clients: Entries, read_rows: Any) -> Entries:
        hook_generator = generator(0, "train", 2, "before_turn")
        return method.before_turn(state.server, clients, read_rows, hook_generator)

    def read_spoilt(numbers: Any) -> Entries:
        return _spoil(read_others(numbers), public)

    overlay = call_before_turn(clients, read_others)
    if not _answers_alike(overlay, call_before_turn, _spoil(clients, public), read_spoilt):
        return "before_turn"

    # ---- Step 3: `download` of a client that took part before, and of one that did not.
    def download(client: Entries) -> Tree:
        return method.download(state.server, method.prepare(state.server, client))

    for number in COHORT[:2]:
        job = trial.find_job(trial.net(), state, number)
        client = {**job.client, "statistics": job.buffers}
        sampled = method.sample(state.server, Draws(0, "train", 2).server(number))
        spoilt = _spoil(client, {*public, *overlay, *sampled})
        if not _answers_alike(download(client), download, spoilt):
            return "download"

    # ---- Step 4: the server that `aggregate` returns.
    aggregate, clients, uploads = _second_aggregation(trial)
    server = aggregate(clients, uploads)[0]
    if not _answers_alike(server, lambda own: aggregate(own, uploads)[0], _spoil(clients, public)):
        return "aggregate"
    return ""


def _find_hook_that_reads_uploads(trial: MethodTrial) -> str:
    """Return the server's hook that goes by more than a mean of uploads, or ""."""
    # A survey, or turns of fewer clients, lets the server look at single ones.
    for played, cohort in enumerate(COHORTS):
        draws = generator(0, "turns", played + 1)
        if trial.method.turns(played, cohort, len(EVERYONE), draws) != [Turn(cohort)]:
            return "turns"

    def average(leaf: Tensor) -> Tensor:
        # Flags and counts have no mean; all get the first client's.
        row = leaf.mean(0, keepdim=True) if leaf.is_floating_point() else leaf[:1]
        return row.expand_as(leaf).clone()

    # An aggregation of means in place of uploads.
    aggregate, clients, uploads = _second_aggregation(trial)
    answer = aggregate(clients, uploads)
    keeps_states = _is_near(answer[1], {name: clients[name] for name in answer[1]})
    is_alike = _answers_alike(answer, aggregate, clients, tree.map(average, uploads))
    return "" if keeps_states and is_alike else "aggregate"


def _second_aggregation(trial: MethodTrial) -> tuple[Callable[..., Any], Entries, Tree]:
    """Return the second round's `aggregate` at equal weights, and its states and uploads."""
    state = trial.play_cohorts("loop")[0][1]
    part = trial.train_part("loop", state, COHORT, COHORT)
    facts = {**state.facts(COHORT), "trained": part.trained, "statistics": part.buffers}
    net = trial.net().bind(state.server_buffers)
    # At equal weights a mean in the place of each upload changes no mean of theirs.
    weight = torch.full((len(COHORT),), 1 / len(COHORT))

    def aggregate(clients: Entries, uploads: Tree) -> Any:
        draws = generator(0, "aggregate", 2)
        return trial.method.aggregate(state.server, clients, net, uploads, weight, draws)

    return aggregate, {**part.client_states, **facts}, part.uploads


def _spoil(clients: Entries, public: set[str]) -> Entries:
    """Return states with nan and other wrong values in all entries but the public ones."""

    def spoil(leaf: Tensor) -> Tensor:
        # Bools and whole numbers have no nan.
        return torch.full_like(leaf, torch.nan) if leaf.is_floating_point() else ~leaf

    spoilt = {name: tree.map(spoil, clients[name]) for name in clients.keys() - public}
    return {**clients, **spoilt}


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
