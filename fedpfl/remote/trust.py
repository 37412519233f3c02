"""Check the tensors of received messages; neither side trusts the other's.

`wire` bounds a message before it unpacks it. Here its tensors are compared with the receiver's
knowledge: the form of an answer follows from the method, its counts from the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpfl.engine import Engine, Local, State, make_backend
from fedpfl.engine.calls import Call, Counts, Participation, TrainCall
from fedpfl.engine.measures import PLUGIN_MEASURES, SUMMED_MEASURES
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.intervals import HIGH, LOW
from fedpfl.ground.records import Record
from fedpfl.ground.tasks import REGRESSION
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method
from fedpfl.models import Net
from fedpfl.remote import wire
from fedpfl.remote.messages import Question

MAX_SIZE_RATIO = (
    4  # times the size of the server's and one client's state; larger messages are refused
)
MAX_OVERHEAD = 2**20  # bytes or entries allowed beside, as for a header


class NotFiniteError(FedpflError):
    """Report an answer with numbers that are not finite."""


class MessageLimits(NamedTuple):
    """The largest size of a message.

    Attributes:
        message_bytes: Of the whole message.
        entries: Of all its tensors, after they are expanded.
    """

    message_bytes: int
    entries: int

    @classmethod
    def of_state(cls, initial_state: State) -> MessageLimits:
        """Return the limits of a run, by the state that it begins with."""
        rows = initial_state.rows
        trees = (initial_state.server, *rows.initials, initial_state.server_buffers)
        return cls(
            message_bytes=MAX_OVERHEAD + MAX_SIZE_RATIO * sum(map(tree.nbytes, trees)),
            entries=MAX_OVERHEAD + MAX_SIZE_RATIO * sum(map(tree.size, trees)),
        )

    def unpack_message(self, message: bytes) -> tuple[Record, Tree]:
        """Return the values and the tree of a message. Raises FedpflError if it is too large."""
        if len(message) > self.message_bytes:
            raise FedpflError(
                f"a message of {len(message):,} bytes, where {self.message_bytes:,} are the most"
            )
        return wire.unpack_message(message, self.entries)


# ---- A node's answer


def select_sent(
    participation: Participation, method: Method, initial_state: State
) -> Participation:
    """Drop the parts of a participation that stay at the node."""
    roles = shared_roles(method)
    return participation._replace(
        client_states=tree.select(participation.client_states, initial_state.rows.varied_entries),
        buffers=_select_roles(participation.buffers, roles),
        updated_buffers=_select_roles(participation.updated_buffers, roles),
    )


def shared_roles(method: Method) -> list[str]:
    """Return the roles with BatchNorm statistics that the server averages."""
    return [role for role, place in method.buffers().items() if place == "aggregate"]


def _select_roles(by_role: Mapping[str, Tree], roles: list[str]) -> dict[str, Tree]:
    return {role: subtree for role, subtree in by_role.items() if role in roles}


# ---- The server checks an answer


def expect_answer(call: Call, net: Net, initial_state: State, shares_states: bool) -> Tree:
    """Return an answer of the form that each client's answer to a call must have.

    The server plays one step of one client from the initial state; its numbers are useless, and
    where samples are at nodes, it has zeros in their place.
    """
    # The fewest samples that make a step take the least time.
    sizes = call.federation.train_sizes
    kinds = torch.tensor(initial_state.rows.kinds)
    costs = sizes.where(sizes > 1, sizes.max())
    client = int(costs.where(kinds == kinds[call.clients[0]], sizes.max() + 1).argmin())
    state = replace(call.state, rows=initial_state.rows)
    overlay = None if call.overlay is None else tree.take(call.overlay, slice(0, 1))
    example: Any = replace(call, state=state, clients=[client], overlay=overlay)
    if isinstance(call, TrainCall):
        example = replace(example, local=_one_step(call.local))
    elif call.tuning:
        tuning = call.tuning._replace(local=_one_step(call.tuning.local))
        example = replace(example, tuning=tuning)
    backend = make_backend(Engine("loop", workers=1), net.copy(), initial_state.rows.device)
    answer = tree.take(backend.run_one(example), 0)
    if isinstance(call, TrainCall) and not shares_states:
        return select_sent(answer, call.method, initial_state)
    return answer


def _one_step(local: Local) -> Local:
    return replace(local, epochs=None, steps=1)


def check_participation(answer: Participation, call: TrainCall, client: int) -> None:
    """Raise FedpflError for a participation that cannot be."""
    if int(answer.client_ids) != client:
        raise FedpflError(f"it answers for client {int(answer.client_ids)}")
    if not all(leaf.isfinite().all() for leaf in _list_floats(answer)):
        raise NotFiniteError("numbers that are not finite")
    samples = int(call.federation.test_sizes[client])
    for moment, counts in (("before", answer.before), ("after", answer.after)):
        # A survey evaluates no client.
        if call.survey is None or int(counts.total):
            check_counts(counts, samples, f"{moment} training")
    traffic = torch.stack([*answer.down, *answer.up])
    if (traffic < 0).any() or (answer.flops < 0).any():
        raise FedpflError("traffic or FLOPs that cannot be")


def check_counts(counts: Counts, samples: int, moment: str) -> None:
    """Raise FedpflError for test results that no model has on so many samples."""
    correct = int(counts.correct)
    total = int(counts.total)
    if total != samples or not 0 <= correct <= total:
        raise FedpflError(
            f"{correct:,} correct of {total:,} samples {moment}, and it has {samples:,}"
        )
    if not counts.loss.isfinite():
        raise NotFiniteError(f"test results {moment} that are not finite")
    if float(counts.loss) < 0:
        raise FedpflError(f"a negative loss {moment}")
    for name, values in counts.measures.items():
        if not _is_possible(name, values, total):
            raise FedpflError(f"a measure {name} {moment} that {total:,} samples cannot have")


def _is_possible(name: str, values: Tensor, samples: int) -> bool:
    """Check a measure: outcomes of so many samples, sums, or a share, which may be undefined."""
    if name in SUMMED_MEASURES:
        return bool((values >= 0).all() and (values.sum(-1) == samples).all())
    if name in REGRESSION.measures:
        return bool(values.isfinite()) and (name == "label_mean" or float(values) >= 0)
    if name.endswith((LOW, HIGH)):
        return not values < 0
    # A plugin's is any number.
    return name in PLUGIN_MEASURES or not (values < 0 or values > 1)


def _list_floats(values: Tree) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(values) if leaf.is_floating_point()]


# ---- A node checks a question's tensors


def check_trees(question: Question, trees: Any, initial_state: State) -> None:
    """Raise FedpflError for tensors that no server of this run sends."""
    # Each part has the run's form but for the lengths of axes.
    if not isinstance(trees, dict):
        raise FedpflError("a message without the parts of a question")
    rows = initial_state.rows
    forms: dict[str, Tree] = {"shared": initial_state.server_buffers}
    if question.shares:
        row = {part: rows.take(part, question.client) for part in ("client", "buffers", "facts")}
        forms |= {"server": initial_state.server, "row": row, "laid": trees.get("laid", {})}
    for name, expected in forms.items():
        if read_form(trees.get(name, {})) != read_form(expected):
            raise FedpflError(f"a message whose part {name} has another form")
    if not {*question.initial} <= {path for path, _ in tree.items(initial_state.server)}:
        raise FedpflError("a message that names entries which the server does not have")


def read_form(values: Any) -> dict[str, tuple[torch.dtype, int]] | None:
    """Return each tensor's dtype and number of axes; None where a leaf is no tensor."""
    try:
        return {path: (dtype, len(shape)) for path, (dtype, shape) in tree.specs(values).items()}
    except (AttributeError, TypeError):
        return None
