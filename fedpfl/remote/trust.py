"""What server and nodes check of each other's messages: neither trusts a byte of the other.

A message is bounded before it is unpacked (`wire`), and what it holds is compared with what the
receiver knows by itself: the form of an answer from the method, its counts from the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedpfl.engine import Engine, FineTuning, Local, State, make_backend
from fedpfl.engine.calls import Call, Counts, Participation, TrainCall
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method
from fedpfl.models import Net
from fedpfl.remote import wire

MAX_SIZE_RATIO = 4  # times what the server and one client hold; larger messages are refused
MAX_OVERHEAD = 2**20  # bytes or entries allowed beside, as for a header


class NotFiniteError(FedpflError):
    """Report an answer whose numbers are not finite."""


class MessageLimits:
    """How large a message may be, by the state that a run begins with.

    Attributes:
        message_bytes: Of the whole message.
        entries: Of all its tensors, after they are expanded.
    """

    def __init__(self, initial_state: State):
        trees = (initial_state.server, initial_state.rows.initial, initial_state.server_buffers)
        self.message_bytes = MAX_OVERHEAD + MAX_SIZE_RATIO * sum(map(tree.nbytes, trees))
        self.entries = MAX_OVERHEAD + MAX_SIZE_RATIO * sum(map(tree.size, trees))

    def check_length(self, message: bytes) -> None:
        """Raise FedpflError for a message that is too large."""
        if len(message) > self.message_bytes:
            raise FedpflError(
                f"a message of {len(message):,} bytes, where {self.message_bytes:,} are the most"
            )


# ---- What leaves a node


def select_sent(
    participation: Participation, method: Method, initial_state: State
) -> Participation:
    """Return what a node sends of a participation: not the state that stays with the client."""
    roles = shared_roles(method)
    return participation._replace(
        client_states=tree.select(participation.client_states, initial_state.rows.varied_entries),
        buffers=_select_roles(participation.buffers, roles),
        updated_buffers=_select_roles(participation.updated_buffers, roles),
    )


def shared_roles(method: Method) -> list[str]:
    """Return the roles whose BatchNorm statistics are averaged at the server."""
    return [role for role, place in method.buffers().items() if place == "aggregate"]


def _select_roles(by_role: Mapping[str, Tree], roles: list[str]) -> dict[str, Tree]:
    return {role: subtree for role, subtree in by_role.items() if role in roles}


# ---- What the server expects of an answer


def expect_answer(call: Call, net: Net, initial_state: State, shares_states: bool) -> Tree:
    """Return an answer of the form that each client's answer to a call must have.

    The server plays one step of one client from the initial state, whose numbers are of no use.
    """
    client = int(call.federation.train_sizes.argmax())
    state = replace(
        initial_state,
        round=call.state.round,
        server=call.state.server,
        server_buffers=call.state.server_buffers,
    )
    example: Any = replace(call, state=state, clients=[client], overlay=_row_of_overlay(call))
    if isinstance(call, TrainCall):
        example = replace(example, local=_one_step(call.local))
    else:
        example = replace(
            example,
            tuning=_one_step_of_tuning(call.tuning),
            before_evaluation=_one_step_of_tuning(call.before_evaluation),
        )
    backend = make_backend(Engine("loop", workers=1), net.copy(), initial_state.rows.device)
    answer = tree.take(backend.run_one(example), 0)
    if isinstance(call, TrainCall) and not shares_states:
        return select_sent(answer, call.method, initial_state)
    return answer


def _row_of_overlay(call: Call) -> dict[str, Tree] | None:
    """Return one client's overlay, whichever."""
    return None if call.overlay is None else tree.take(call.overlay, slice(0, 1))


def _one_step(local: Local) -> Local:
    return replace(local, epochs=None, steps=1)


def _one_step_of_tuning(tuning: FineTuning | None) -> FineTuning | None:
    return None if tuning is None else tuning._replace(local=_one_step(tuning.local))


def check_participation(answer: Participation, call: TrainCall, client: int) -> None:
    """Raise FedpflError for a participation that cannot be."""
    if int(answer.client_ids) != client:
        raise FedpflError(f"it answers for client {int(answer.client_ids)}")
    samples = int(call.federation.test_sizes[client])
    for name in ("before", "after"):
        counts = getattr(answer, name)
        is_unasked = call.survey is not None and not int(counts.total)
        if not is_unasked:
            check_counts(counts, samples, f"{name} training")
    floats = [leaf for leaf in tree.leaves(answer) if leaf.is_floating_point()]
    if not all(leaf.isfinite().all() for leaf in floats):
        raise NotFiniteError("numbers that are not finite")
    traffic = (*answer.down, *answer.up)
    max_traffic = MAX_SIZE_RATIO * 64 * (MAX_OVERHEAD + tree.size(call.state.server))
    if any(not 0 <= int(value) <= max_traffic for value in traffic) or bool(
        (answer.flops < 0).any()
    ):
        raise FedpflError("traffic or FLOPs that cannot be")


def check_counts(counts: Counts, samples: int, moment: str) -> None:
    """Raise FedpflError for test results that no model has on so many samples."""
    correct = int(counts.correct)
    total = int(counts.total)
    if total != samples or not 0 <= correct <= total:
        raise FedpflError(
            f"{correct:,} correct of {total:,} samples {moment}, and it has {samples:,}"
        )
    if float(counts.loss) < 0:
        raise FedpflError(f"a negative loss {moment}")


def largest_entry(uploads: Tree) -> float:
    """Return the largest absolute value that a client sends."""
    sizes = [float(leaf.abs().max()) for leaf in _float_leaves(uploads) if leaf.numel()]
    return max(sizes, default=0.0)


def _float_leaves(uploads: Tree) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(uploads) if torch.is_floating_point(leaf)]


# ---- What a node expects of a request


def is_whole_number(value: Any) -> bool:
    """Return whether a value is a whole number; true and false are none."""
    return type(value) is int


def read_round(value: Any) -> int:
    """Return the number of a round. Raises FedpflError for what is none."""
    if not is_whole_number(value) or not 0 <= value < 2**31:
        raise FedpflError("a message whose round is no number")
    return value


def check_request(fields: Mapping[str, Any], trees: Any, initial_state: State) -> None:
    """Raise FedpflError for a request that no server of this run makes.

    What is asked of the client is read by `read_local`, `read_draws` and `read_tuning`.
    """
    read_round(fields.get("round"))
    if type(fields.get("client")) is not int or type(fields.get("shares")) is not bool:
        raise FedpflError("a message that asks for no client")
    question = fields.get("asks")
    expected_keys = ({"draws", "local", "stopping", "turn"}, {"tuning", "before"})
    if not isinstance(question, dict) or question.keys() not in expected_keys:
        raise FedpflError("a message that asks nothing known")
    if not isinstance(trees, dict) or not isinstance(trees.get("shared"), dict):
        raise FedpflError("a message without the parts of a request")
    _require_form(trees["shared"], initial_state.server_buffers, "statistics")
    if fields["shares"]:
        row = {part: initial_state.rows.take(part, 0) for part in ("client", "buffers", "facts")}
        _require_form(trees.get("server"), initial_state.server, "the server's tree")
        _require_form(trees.get("row"), row, "a client's state")
        return
    entries = dict(tree.items(initial_state.server))
    paths = entries.keys()
    initial = fields.get("initial")
    places = fields.get("places", [])
    if type(fields.get("participated")) is not bool or not _are_paths(initial, paths):
        raise FedpflError("a message that names entries which the server does not have")
    if not isinstance(places, list) or not _are_paths([p for p in places if p is not None], paths):
        raise FedpflError("a message that names entries which the server does not have")
    _require_sent_form(trees.get("sent"), places, entries)


def _require_sent_form(
    sent: Any, places: Sequence[str | None], entries: Mapping[str, Tensor]
) -> None:
    """Raise FedpflError where leaves do not fit the entries that they claim to be."""
    leaves = [] if sent is None else [*wire.iterate_sent_leaves(sent)]
    if len(leaves) != len(places):
        raise FedpflError("a message that says of other entries what they are")
    for leaf, path in zip(leaves, places, strict=True):
        if path is not None and (leaf.value.dtype, leaf.value.dim()) != (
            entries[path].dtype,
            entries[path].dim(),
        ):
            raise FedpflError(f"a message whose {path} has another form")


def _are_paths(names: Any, paths: Set[str]) -> bool:
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return is_list and all(name in paths for name in names)


def _require_form(values: Any, expected: Tree, what: str) -> None:
    """Raise FedpflError for a tree of another form, but for the lengths of axes."""
    try:
        form = tree.specs(values)
    except (AttributeError, TypeError):
        form = {}
    expected_form = tree.specs(expected)
    if form.keys() != expected_form.keys() or any(
        form[path][0] != dtype or len(form[path][1]) != len(shape)
        for path, (dtype, shape) in expected_form.items()
    ):
        raise FedpflError(f"a message whose {what} have another form")


def read_local(values: Any) -> Local:
    """Return how a client trains. Raises FedpflError for what is no such thing."""
    try:
        return Local(**{**values, "betas": tuple(values["betas"])})
    except (KeyError, TypeError, ValueError):
        raise FedpflError("a message that says nothing known of local training") from None


def read_draws(values: Any) -> Draws:
    """Return the random draws of a round. Raises FedpflError for what is no such thing."""
    try:
        draws = Draws(**values)
    except (TypeError, ValueError):
        raise FedpflError("a message that says nothing known of random draws") from None
    numbers = draws.seed, draws.round
    if draws.protection is not None or not all(type(number) is int for number in numbers):
        raise FedpflError("a message whose random draws have no numbers")
    return draws


def read_tuning(values: Any) -> FineTuning | None:
    """Return how models are fine-tuned. Raises FedpflError for what is no such thing."""
    if values is None:
        return None
    if not isinstance(values, dict) or values.get("part") not in ("all", "head"):
        raise FedpflError("a message that says nothing known of fine-tuning")
    local = read_local(values.get("local"))
    draws = read_draws(values.get("draws"))
    return FineTuning(local, draws, values["part"])
