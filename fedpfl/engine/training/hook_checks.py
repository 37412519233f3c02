"""Rules for what a method's hooks return, checked when a process first calls them."""

from __future__ import annotations

import copy
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from itertools import pairwise
from numbers import Integral
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpfl.engine.training.sgd import Local
from fedpfl.ground import tree
from fedpfl.ground.errors import MethodError
from fedpfl.ground.tree import Tree
from fedpfl.methods import FACTS, ORDER, Batch, Method, Phase, Turn, argument_order_fault
from fedpfl.models import Net

Faults = Iterator[str]
AnswerForms = dict[str, dict[int, dict[str, Any]]]
"""By hook and client, the `form` of what the client found out."""

VMAP_ERRORS = (
    "vmap: It looks like",
    "dynamic shape",
    "Cannot access data pointer",
    "aten::equal",
    "torch.allclose isn't",
)
"""What PyTorch says where a vectorised function asks for the values of a tensor."""
ONE_HOT_ADVICE = (
    "calls one_hot, which looks at the values of a tensor, but it is asked about many clients at"
    " once: write (y[:, None] == torch.arange(classes, device=y.device)).float()"
)
VMAP_ADVICE = (
    "looks at the values of a tensor (if, while, int(), .item(), x[mask], x[number]), but it is"
    " asked about many clients at once: use torch.where, x[number[None]][0], or find it out in"
    " before_training or after_training, which may look"
)


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


def with_hook_checks(
    method: Method,
    net: Net | None = None,
    client: dict[str, Tree] | None = None,
    classes: int = 0,
) -> Method:
    """Return the method with hooks that raise MethodError where they break their rule.

    Type and equality are the same.

    Args:
        method: Is copied.
        net: What answers are compared with, as are the next two; as far as it is known.
        client: A client's initial state.
        classes: How many there are.
    """
    checked_method = copy.copy(method)
    expected = Expected(method, net, client, classes)
    for hook_name, rule in HOOK_RULES.items():
        vars(checked_method)[hook_name] = CheckedHook(
            hook=getattr(method, hook_name),
            name=f"{type(method).__name__}.{hook_name}",
            rule=rule,
            expected=expected,
        )
    return checked_method


def vmap_advice(error: BaseException) -> str:
    """Return what to do about a vectorized hook that looked at values, or ""."""
    is_vmap_error = any(sign in str(error) for sign in VMAP_ERRORS)
    if not isinstance(error, RuntimeError) or not is_vmap_error:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and "one_hot(" in (frames[-1].line or ""):
        return ONE_HOT_ADVICE
    return VMAP_ADVICE


def persistent_entries(client: dict[str, Tree], initial: dict[str, Tree]) -> dict[str, Tree]:
    """Return the entries of a client's state that last: those that `init` gave it."""
    return {name: client[name] for name in initial if name in client}


def describe_form_change(new: Tree, old: Tree) -> str:
    """Return an entry in which a tree has another form than before, or ""."""
    new_forms = tree.specs(new)
    old_forms = tree.specs(old)
    if new_forms == old_forms:
        return ""
    name = _first_difference(new_forms, old_forms)
    old_form = _describe_form(old_forms.get(name))
    new_form = _describe_form(new_forms.get(name))
    return f"{name or 'it'} was {old_form} and is {new_form}"


def _first_difference(forms: dict[str, Any], others: dict[str, Any]) -> str:
    """Return the first name, in alphabetical order, at which two dicts of forms differ."""
    names = forms.keys() | others.keys()
    return min(name for name in names if forms.get(name) != others.get(name))


def _describe_form(form: Any) -> str:
    """Return dtype and shape of a leaf in words."""
    return f"{form[0]} {list(form[1])}" if form else "missing"


def answer_form(answer: dict[str, Tree]) -> dict[str, Any]:
    """Return dtype and shape of a client's answer by name, without rows if Ragged."""

    def drop_rows(ragged: tree.Ragged) -> Tree:
        return tree.map(lambda leaf: leaf[:0], ragged.values)

    return tree.specs(tree.at_ragged(drop_rows, answer))


def require_equal_forms(hook: str, forms: dict[int, dict[str, Any]]) -> None:
    """Raise MethodError where a hook's answers for two clients differ in form."""
    reference, *others = sorted(forms)
    for client in others:
        if forms[client] == forms[reference]:
            continue
        name = _first_difference(forms[reference], forms[client])
        reference_form = _describe_form(forms[reference].get(name))
        form = _describe_form(forms[client].get(name))
        raise MethodError(
            f"{hook} answers with other forms: {name} is {reference_form} for client {reference} "
            f"and {form} for client {client}; answer all alike, and where their first axis differs "
            "by tree.Ragged(values) (docs/design.md#a-method)"
        )


@dataclass(frozen=True)
class CheckedHook:
    """Call a hook, and raise MethodError where it breaks its rule.

    So it does where the hook changes its arguments, or looks at values that it may not see.
    """

    hook: Callable[..., Any]
    name: str = field(compare=False)
    rule: HookRule = field(compare=False)
    expected: Expected = field(compare=False)

    def __call__(self, *arguments: Any) -> Any:
        """Return the hook's answer."""
        if self.rule.often and self.name in self.expected.checked:
            return self.hook(*arguments)
        self.expected.checked.add(self.name)
        names = _argument_names(self.hook)
        trees = {
            name: argument
            for name, argument in zip(names, arguments, strict=False)
            if isinstance(argument, dict | Tensor)
        }
        old_versions = tensor_versions(trees)
        answer = self._call_hook(arguments, trees)
        require_unchanged(trees, old_versions, self.name)
        try:
            fault = next(self.rule.faults(answer, self.expected, *arguments), "")
        except RecursionError:
            fault = "a tree that contains itself"
        if fault:
            raise MethodError(
                f"{self.name} returned {fault}; it must return {self.rule.must} "
                "(docs/design.md#a-method)"
            )
        if self.rule.faults is _phases_faults:
            return [self._with_checked_functions(phase) for phase in answer]
        return answer

    def _call_hook(self, arguments: tuple[Any, ...], trees: dict[str, Any]) -> Any:
        """Return the hook's answer, its errors explained where they are known."""
        try:
            return self.hook(*arguments)
        except RuntimeError as error:
            advice = vmap_advice(error)
            if not advice:
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise MethodError(f"{self.name} {advice} ({frame.filename}:{frame.lineno})") from error
        except KeyError as error:
            advice = self._advice_for_missing_entry()
            params = trees.get("params")
            if not advice or not isinstance(params, dict):
                raise
            raise MethodError(
                f"{self.name} looks for {error} in the tree that is trained, which has "
                f"{', '.join(params)}: {advice}"
            ) from error

    def _advice_for_missing_entry(self) -> str:
        """Return what to override where FedAvg's hooks meet another tree, or ""."""
        is_default = self.expected.default
        hook_name = self.name.rpartition(".")[2]
        if hook_name == "loss" and is_default("loss"):
            return "override `loss`, as FedAvg's asks `predict` of all that is trained"
        if hook_name == "predict" and is_default("evaluated"):
            return "override `evaluated`, which returns the part of it that `predict` takes"
        return ""

    def _with_checked_functions(self, phase: Phase) -> Phase:
        """Return a phase whose own functions are checked in the same way."""
        method_name = type(self.expected.method).__name__
        rules = {"loss": LOSS, "step": STEP, "after_gradient": AFTER_GRADIENT}
        checked_functions: dict[str, Any] = {}
        for key, rule in rules.items():
            function = getattr(phase, key)
            if function:
                function_name = getattr(function, "__name__", "phases")
                checked_functions[key] = CheckedHook(
                    hook=function,
                    name=f"{method_name}.{function_name} (Phase.{key})",
                    rule=rule,
                    expected=self.expected,
                )
        return phase._replace(**checked_functions)


def _argument_names(hook: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a hook's arguments."""
    if isinstance(hook, MethodType):
        return _signature_names(hook.__func__, is_bound=True)
    return _signature_names(hook, is_bound=False)


# To read a signature takes longer than many hooks do.
@functools.lru_cache(maxsize=256)
def _signature_names(function: Callable[..., Any], is_bound: bool) -> tuple[str, ...]:
    """Return the names of a function's arguments, without the object that it is bound to."""
    hook = MethodType(function, object) if is_bound else function
    return tuple(inspect.signature(hook).parameters)


def tensor_versions(shown_trees: Tree) -> dict[str, tuple[int, int]]:
    """Return tensors by name, and how often each was changed in place."""
    return {
        name: (id(leaf), leaf._version)
        for name, leaf in tree.items(shown_trees)
        if isinstance(leaf, Tensor)
    }


def require_unchanged(
    shown_trees: Tree, old_versions: dict[str, tuple[int, int]], name: str
) -> None:
    """Raise MethodError where `name` has changed a tree that it was shown in place."""
    changes = tensor_versions(shown_trees).items() ^ old_versions.items()
    if changes:
        raise MethodError(
            f"{name} changed its argument {min(changes)[0]} in place; return new trees, "
            "leave those given"
        )


# ---- what is wrong with an answer


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
    cohort = len(arguments[4])
    for name, leaf in tree.items(value[1]):
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
