"""Rules for what a method's hooks return, and what is wrong with an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpfl.engine.training.forms import describe_form_change, persistent_entries
from fedpfl.engine.training.local import Local
from fedpfl.ground import tree
from fedpfl.ground.casting import cast_value, schema_annotations
from fedpfl.ground.tree import Tree
from fedpfl.methods import FACTS, ORDER, Batch, Method, Phase, Turn, argument_order_fault
from fedpfl.models import Net

Faults = Iterator[str]


@dataclass
class Expected:
    """Hold what answers are compared with, as far as it is known.

    Attributes:
        client: A client's initial state.
        classes: How many the data have.
        checked: The hooks of every step that have answered; their first answer stands for all.
    """

    method: Method
    net: Net | None = None
    client: dict[str, Tree] | None = None
    classes: int = 0
    checked: set[str] = field(default_factory=set)

    def default(self, *hooks: str) -> bool:
        """Return whether these hooks are FedAvg's."""
        return all(getattr(type(self.method), hook) is getattr(Method, hook) for hook in hooks)


class HookRule(NamedTuple):
    """Say what a hook must return.

    Attributes:
        must: For the message.
        faults: `faults(answer, expected, *arguments)` yields what is wrong with an answer.
        often: Whether every step calls the hook, and the first answer stands for all.
    """

    must: str
    faults: Callable[..., Faults]
    often: bool = False


def _kind(value: Any) -> str:
    """What kind of thing it is."""
    if value is None:
        return "None (is a `return` missing?)"
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {list(value.shape)}"
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _tree_faults(
    value: Any, expected: Expected, *arguments: Any, at: str = "", ragged: bool = False
) -> Faults:
    """A tree has tensors for leaves, and strings for names. ragged: and may have what is Ragged,
    not completed yet.
    """
    if ragged and isinstance(value, tree.Ragged):
        yield from _tree_faults(value.values, expected, at=at)
        if len({leaf.shape[:1] or None for leaf in tree.leaves(value.values)} | {None}) != 2:
            yield f"{at} as tree.Ragged, whose leaves have no first axis of one length"
        return
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if not isinstance(value, dict):
        if not isinstance(value, Tensor):
            yield f"{_kind(value)}{at and f' as entry {at}'}"
        return
    for name, own in value.items():
        if not isinstance(name, str):
            yield f"an entry named {name!r}, which is no string"
        yield from _tree_faults(own, expected, at=f"{at}.{name}" if at else name, ragged=ragged)


def _dict_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    if not isinstance(value, dict):
        yield _kind(value)
    yield from _tree_faults(value, expected)


def _found_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    if not isinstance(value, dict):
        yield _kind(value)
    yield from _tree_faults(value, expected, ragged=True)


def _pair_faults(value: Any) -> Faults:
    if not isinstance(value, tuple | list) or hasattr(value, "_fields") or len(value) != 2:
        yield _kind(value)


def _model_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    """Where FedAvg's `predict` has it, a tree holds the whole network."""
    yield from _tree_faults(value, expected)
    if expected.net is not None:
        named = value if isinstance(value, dict) else {}
        for name, leaf in expected.net.params.items():
            if name not in named:
                yield f"a model without the network's {name}"
            if named[name].shape != leaf.shape:
                yield (
                    f"{name} of shape {list(named[name].shape)}, which the network has as"
                    f" {list(leaf.shape)}"
                )


def _start_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    yield from (
        _model_faults if expected.default("evaluated", "predict", "loss") else _tree_faults
    )(value, expected)


def _judged_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    yield from (_model_faults if expected.default("predict") else _tree_faults)(value, expected)


def _states_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    """The server's and a client's, or an upload and a client's."""
    yield from _pair_faults(value)
    yield from _tree_faults(value[0], expected)
    yield from _dict_faults(value[1], expected)


def _init_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    yield from _states_faults(value, expected)
    if known := [name for name in FACTS if name in value[1]]:
        yield (
            f"a client state with {known[0]!r}, which the engine lays over it: read it, and leave"
            " it out here"
        )


def _before_turn_faults(
    value: Any, expected: Expected, server: Any, clients: dict[str, Tree], *arguments: Any
) -> Faults:
    yield from _dict_faults(value, expected)
    cohort = len(clients["number"])
    for name, leaf in tree.items(value):
        if leaf.dim() == 0 or len(leaf) != cohort:
            yield f"{name} as a tensor {list(leaf.shape)} for {cohort} clients"


def _finish_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    ragged: list[tree.Ragged] = []
    yield from _states_faults(value, expected)
    tree.at_ragged(ragged.append, value[0])
    if ragged:
        yield "an upload with a tree.Ragged in it; what goes up has one form for all"
    if expected.client is not None and (
        change := describe_form_change(
            persistent_entries(value[1], expected.client), expected.client
        )
    ):
        yield f"a client state in another form than init's, {change}"


def _aggregate_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    yield from _states_faults(value, expected)
    _, clients = value
    cohort = len(arguments[4])
    for name, leaf in tree.items(clients):
        if leaf.dim() == 0 or len(leaf) != cohort:
            yield f"the clients' {name} as a tensor {list(leaf.shape)} for a cohort of {cohort}"


def _init_clients_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    yield from _dict_faults(value, expected)
    known = dict(tree.items(expected.client))
    for name, leaf in tree.items(value):
        if name not in known:
            yield f"{name}, which init's client state does not have"
        if leaf.shape != (arguments[0], *known[name].shape):
            yield (
                f"{name} of shape {list(leaf.shape)} for {arguments[0]} clients that have"
                f" {list(known[name].shape)} each"
            )


def _buffers_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    if not isinstance(value, dict):
        yield _kind(value)
    for where in value.values():
        if where not in ("aggregate", "local"):
            yield repr(where)


def _turns_faults(
    value: Any, expected: Expected, played: int, cohort: list[int], clients: int, *arguments: Any
) -> Faults:
    # ---- Each turn by itself
    if not isinstance(value, list):
        yield _kind(value)
    for turn in value:
        if not isinstance(turn, Turn):
            yield f"a list with {_kind(turn)} in it"
        if turn.survey and (change := argument_order_fault(turn.survey, ORDER["survey"])):
            yield f"a turn whose survey takes {change}"
        if wrong := [
            number
            for number in turn.clients
            if not isinstance(number, int) or not 0 <= number < clients
        ]:
            yield f"client {wrong[0]!r} of {clients}"
        if not turn.clients:
            yield "a turn without clients"
        if not turn.trains and not turn.survey:
            yield "a turn in which nobody trains, and no survey of it"

    # ---- Who stands twice: in one turn, or among those who train
    train = sorted(number for turn in value if not turn.survey for number in turn.clients)
    for numbers in (train, *(sorted(turn.clients) for turn in value)):
        if twice := [number for number, after in pairwise(numbers) if number == after]:
            yield f"client {twice[0]} twice"
    if not train:
        yield "no turn in which clients train"


def _phases_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    if not isinstance(value, list):
        yield _kind(value)
    params = next(own for own in (*arguments[2:3], arguments[0]) if isinstance(own, dict | Tensor))
    for phase in value:
        if not isinstance(phase, Phase):
            yield f"a list with {_kind(phase)} in it"
        for name, least in (("epochs", 0), ("batches", 1)):
            if not isinstance(count := getattr(phase, name), Integral) or count < least:
                yield f"a phase of {count!r} {name}"
        for name in ("loss", "step", "after_gradient"):
            if (asked := getattr(phase, name)) and (
                change := argument_order_fault(asked, ORDER[name])
            ):
                yield f"a phase whose {name} takes {change}"
        yield from _mask_faults(phase.mask, params)
        if wrong := phase.sgd.keys() - {own.name for own in fields(Local)}:
            yield f"a phase with sgd value {min(wrong)}, which `local` does not have"
        yield from _sgd_faults(phase.sgd)


def _sgd_faults(sgd: Mapping[str, Any]) -> Faults:
    annotations = schema_annotations(Local)
    for name, value in sgd.items():
        if isinstance(value, Tensor):
            yield f"a phase whose sgd has {_kind(value)} for {name}, which is one for all clients"
        try:
            cast_value(value, annotations[name], name)
        except ValueError as error:
            yield f"a phase whose sgd value {error}"


def _mask_faults(mask: Tree, params: Tree) -> Faults:
    try:
        pairs = zip(
            tree.items(tree.expand(True if mask is None else mask, params)),
            tree.leaves(params),
            strict=True,
        )
    except KeyError as missing:
        yield f"a phase whose mask lacks the entry {missing.args[0]}"
        return
    for (name, own), leaf in pairs:
        if not isinstance(own, bool) and not (isinstance(own, Tensor) and own.dtype == torch.bool):
            yield f"a phase whose mask has {_kind(own)} for {name}"
        if isinstance(own, Tensor) and own.shape != leaf.shape:
            yield (
                f"a phase whose mask has shape {list(own.shape)} for {name}, which is"
                f" {list(leaf.shape)}"
            )


def _scalar_faults(value: Any, *arguments: Any) -> Faults:
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        yield _kind(value)


def _detached_faults(value: Tensor, params: Tree) -> Faults:
    """What training goes by hangs on what it moves."""
    if (
        torch.is_grad_enabled()
        and not value.requires_grad
        and any(p.requires_grad for p in tree.leaves(params))
    ):
        yield "what has no gradient (is it detached, or computed under torch.no_grad?)"


def _loss_faults(
    value: Any, expected: Expected, server: Any, client: Any, net: Any, params: Tree, batch: Batch
) -> Faults:
    """A loss, and perhaps a tree of what is kept of each sample beside it."""
    if isinstance(value, tuple):
        yield from _pair_faults(value)
        yield from _tree_faults(value[1], expected)
        for name, leaf in tree.items(value[1]):
            if not leaf.dim() or len(leaf) != len(batch.x):
                yield (
                    f"beside the loss {_kind(leaf)} as {name or 'a tree'} for {len(batch.x)}"
                    " samples"
                )
        value = value[0]
    yield from _scalar_faults(value)
    yield from _detached_faults(value, params)


def _step_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    yield from _pair_faults(value)
    yield from _tree_faults(value[0], expected)
    if change := describe_form_change(value[0], arguments[3]):
        yield f"a trained tree in another form, {change}"
    yield from _scalar_faults(value[1])


def _after_gradient_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    yield from _dict_faults(value, expected)
    if change := describe_form_change(value, arguments[1]):
        yield f"a client state in another form, {change}"


def _updated_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    yield from _dict_faults(value, expected)
    for role, own in value.items():
        if role not in expected.method.buffers():
            yield f"statistics of {role}, which `buffers` does not name"
        if wrong := [name for name, leaf in tree.items(own) if leaf.dtype != torch.bool]:
            yield f"{role}.{wrong[0]}, which is not bool"
        if expected.net is not None and (
            wrong := sorted(dict(tree.items(own)).keys() ^ expected.net.buffers.keys())
        ):
            yield f"{role}.{wrong[0]} too many or too few"


def _predict_faults(value: Any, expected: Expected, net: Any, params: Tree, batch: Batch) -> Faults:
    if expected.default("predict"):
        return  # what the network answers is no matter of the method
    yield from _detached_faults(value, params) if isinstance(value, Tensor) else ()
    if (
        not isinstance(value, Tensor)
        or not value.is_floating_point()
        or value.shape != (len(batch.x), expected.classes)
    ):
        yield f"{_kind(value)} for {len(batch.x)} samples of {expected.classes} classes"


def _metrics_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    yield from _dict_faults(value, expected)
    for name, leaf in tree.items(value):
        if leaf.dim():
            yield f"{_kind(leaf)} as {name}"


def _masks_faults(value: Any, expected: Expected, *arguments: Any) -> Faults:
    if not isinstance(value, dict):
        yield _kind(value)
    for mask in value.values():
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            yield f"{_kind(mask)} as a mask"


FOUND = HookRule("a dict of trees, to be laid over the client's state", _found_faults)
MODEL = HookRule(
    "a tree of tensors that `predict` takes; FedAvg's takes all the network's parameters by name",
    _judged_faults,
)
PHASES = HookRule(
    "a list of Phase, whose masks are bools or bool tensors of the trained tree's shapes",
    _phases_faults,
)
LOSS = HookRule(
    "the loss, a 0-dimensional tensor, or `(loss, tree of [batch, ...])`", _loss_faults, often=True
)
STEP = HookRule(
    "two things: the new tree in the form of `params`, and the loss, a 0-dimensional tensor",
    _step_faults,
    often=True,
)
AFTER_GRADIENT = HookRule(
    "the client's state, in the form in which it was given", _after_gradient_faults, often=True
)
HOOK_RULES = {
    "init": HookRule("two things: the server's tree and a client's state, a dict", _init_faults),
    "init_clients": HookRule(
        "a dict of entries of init's client state, stacked `[clients, ...]`", _init_clients_faults
    ),
    "buffers": HookRule("a dict of 'aggregate' or 'local' by model role", _buffers_faults),
    "turns": HookRule("a list of Turn, in which clients train, each once", _turns_faults),
    "before_turn": HookRule(
        "a dict of trees, stacked `[cohort, ...]`, to be laid over the clients' states",
        _before_turn_faults,
    ),
    "sample": FOUND._replace(faults=_dict_faults),
    "before_training": FOUND,
    "prepare": HookRule("the client's state, a dict of trees", _dict_faults),
    "download": HookRule("a tree of tensors, `tree.Masked` or `tree.Agreed`", _tree_faults),
    "start": HookRule(
        "a tree of tensors; FedAvg's `loss` takes all the network's parameters by name",
        _start_faults,
    ),
    "phases": PHASES,
    "loss": LOSS,
    "after_training": FOUND,
    "updated_buffers": HookRule(
        "by model role a tree of bools in the form of its statistics", _updated_faults
    ),
    "finish": HookRule(
        "two things: the upload, a tree, and the client's state, a dict in the form of init's",
        _finish_faults,
    ),
    "aggregate": HookRule(
        "two things: the server's tree and the clients' states, stacked, in the form of init's",
        _aggregate_faults,
    ),
    "evaluated": MODEL,
    "before_evaluation": FOUND,
    "personal": MODEL,
    "predict": HookRule("logits `[batch, classes]`", _predict_faults, often=True),
    "finetuning": PHASES,
    "metrics": HookRule("a dict of 0-dimensional tensors", _metrics_faults),
    "masks": HookRule("a dict of bool tensors", _masks_faults),
}
"""By hook."""
