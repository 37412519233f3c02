"""Peers that nothing is repaired in: their models after each round, in all or half the clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from outside.peers import Comparison, be_quiet
from outside.problem import CLIENTS, Models, Problem, draw_halves

Snapshot = Callable[[Any], Models]


class Keeper:
    """Have a driver of fedpfl.oracle keep models after each round."""

    snapshot: Any = None

    def play(
        self: Any,
        name: str,
        snapshot: Snapshot | None = None,
        rounds: int = 2,
        prepare: Callable[[Any], None] = lambda server: None,
        cohorts: Sequence[Sequence[int]] = (),
        **options: Any,
    ) -> list[Models]:
        """Train, and return the models after each round; a snapshot takes them of the server."""
        self.cohorts = [*map(list, cohorts or [range(CLIENTS)] * rounds)]
        self.taken = {}
        self.snapshot, self.prepare = snapshot or type(self).snapshot, prepare
        with be_quiet():
            super().play(name, **options)
        return [self.taken[number] for number in range(1, rounds + 1)]


class Case(NamedTuple):
    """Say what is compared of a method.

    Attributes:
        method: in fedpfl.
        name: there.
        options: there.
        settings: of fedpfl.
        snapshot: what is kept of the server; None: what the driver keeps.
        detail: the setting, for the table.
        is_partial: whether it is also played by half the clients a round.
        is_convolved: whether the network has convolutions and BatchNorm.
    """

    method: str
    name: str
    options: Mapping[str, Any] = MappingProxyType({})
    settings: tuple[str, ...] = ()
    snapshot: Snapshot | None = None
    detail: str = ""
    is_partial: bool = True
    is_convolved: bool = False


def list_plain_comparisons(cases: Sequence[Case], repository: str, driver: Any) -> list[Comparison]:
    """Return the comparisons of cases, of all clients in each round and of half of them."""

    def compare_plainly(case: Case, is_partial: bool) -> Comparison:
        def play(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
            rounds = 4 if is_partial else 2
            settings = [f"method={case.method}", *case.settings]
            if case.is_convolved:
                problem = Problem(problem.folder, problem.engine, is_convolved=True)
            settings += ["participation=0.5"] if is_partial else []
            cohorts = draw_halves(rounds) if is_partial else ()
            theirs = driver(folder, problem).play(
                case.name, case.snapshot, rounds, cohorts=cohorts, **case.options
            )
            return problem.play(*settings, rounds=rounds), theirs

        detail = ", ".join(filter(None, (case.detail, "half the clients" * is_partial)))
        return Comparison(case.method, repository, detail, "", play)

    comparisons = [compare_plainly(case, False) for case in cases]
    return comparisons + [compare_plainly(case, True) for case in cases if case.is_partial]
