"""A backend for clients with networks of several kinds: one backend for each kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedpfl.engine.backends.backend import Backend, Engine
from fedpfl.engine.calls import Answer, Call, group_by_kind, join_answers, select_clients
from fedpfl.ground.errors import MethodError
from fedpfl.models import Net


def make_by_kind(net: Net, make: Callable[[Net], Backend]) -> Backend:
    """Return the backend of a network, or of all kinds together."""
    backends = [make(kind) for kind in net.nets]
    return BackendByKind(net, backends) if len(backends) > 1 else backends[0]


class _Part(NamedTuple):
    """Hold the clients of one kind in a call.

    Attributes:
        number: The call's.
        kind: Of the clients.
        positions: In the call.
        call: About them alone.
    """

    number: int
    kind: int
    positions: list[int]
    call: Call


class BackendByKind(Backend):
    """Split calls by kind, and join what has one form in all answers."""

    def __init__(self, net: Net, backends: Sequence[Backend]):
        self.net = net
        self._backends = backends
        self.name = backends[0].name

    @property
    def engine(self) -> Engine:  # type: ignore[override]
        """Return the narrowest of the backends'."""
        engines = [backend.engine for backend in self._backends]
        return min(engines, key=lambda engine: engine.width or math.inf)

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend."""
        # ---- Step 1: the clients of each kind.
        parts = [
            _Part(number, kind, positions, select_clients(call, positions))
            for number, call in enumerate(calls)
            for kind, positions in group_by_kind(call).items()
        ]

        # ---- Step 2: each backend answers for its kind, of all calls together.
        answered: list[tuple[_Part, Answer]] = []
        for kind, backend in enumerate(self._backends):
            own = [part for part in parts if part.kind == kind]
            answers = backend.run([part.call for part in own]) if own else []
            answered += zip(own, answers, strict=True)

        # ---- Step 3: the answers to each call are joined.
        return [self._join(number, call, answered) for number, call in enumerate(calls)]

    def _join(self, number: int, call: Call, answered: list[tuple[_Part, Answer]]) -> Answer:
        """Return the answer to a call; an error of a part is one."""
        own = [(part, answer) for part, answer in answered if part.number == number]
        for _, answer in own:
            if isinstance(answer, Exception):
                return answer
        order = [position for part, _ in own for position in part.positions]
        try:
            return join_answers(call, [answer for _, answer in own], order)
        except MethodError as error:
            return error
