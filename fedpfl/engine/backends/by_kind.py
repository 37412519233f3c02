"""A backend for clients with networks of several kinds: one backend for each kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from fedpfl.engine.backends.backend import Backend, Engine
from fedpfl.engine.calls import Answer, Call, group_by_kind, join_answers, select_clients
from fedpfl.models import Net


def make_by_kind(net: Net, make: Callable[[Net], Backend]) -> Backend:
    """Return the backend of a network, or of all kinds together."""
    backends = [make(kind) for kind in net.nets]
    return BackendByKind(net, backends) if len(backends) > 1 else backends[0]


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
        groups_by_call = [group_by_kind(call) for call in calls]
        answers_by_call: list[dict[int, Answer]] = [{} for _ in calls]
        # Each backend answers for its kind, of all calls together.
        for kind, backend in enumerate(self._backends):
            numbers = [i for i, groups in enumerate(groups_by_call) if kind in groups]
            parts = [select_clients(calls[i], groups_by_call[i][kind]) for i in numbers]
            for number, answer in zip(numbers, backend.run(parts) if parts else (), strict=True):
                answers_by_call[number][kind] = answer
        return [*map(_join_kinds, calls, groups_by_call, answers_by_call)]


def _join_kinds(
    call: Call, groups: Mapping[int, list[int]], answer_by_kind: Mapping[int, Answer]
) -> Answer:
    """Return the answer to a call; an error about a kind is one."""
    for answer in answer_by_kind.values():
        if isinstance(answer, Exception):
            return answer
    order = [position for kind in answer_by_kind for position in groups[kind]]
    return join_answers(call, [*answer_by_kind.values()], order)
