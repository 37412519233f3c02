"""Rounds as plain loops over clients: one model, `torch.optim.SGD`, nothing shared with the package.

Batch orders, cohorts and random numbers are inputs. A method is what `play` asks of it.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = dict[str, Tensor]
Order = Callable[[int, int, int, int], Tensor]
HEAD = ("classifier.weight", "classifier.bias")
WATCHED = (2, 5, 7, 9)
"""Clients whose own models are compared: one that trains twice in a row, one of a single batch, one
that comes in round 3 alone, one of a single sample.
"""


@dataclass
class Client:
    """Normalised images and labels."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    held_x: Tensor
    held_y: Tensor


@dataclass
class Setting:
    """Everything that is given. `order(round, client, epoch, samples)` is a permutation; rounds
    count from 1.
    """

    module: nn.Module
    clients: list[Client]
    cohorts: list[list[int]]
    order: Order
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float

    @property
    def initial(self) -> Weights:
        return values_of(self.module)

    @property
    def names(self) -> list[str]:
        """Return the parameters' names."""
        return [name for name, _ in self.module.named_parameters()]

    @property
    def everyone(self) -> range:
        return range(len(self.clients))

    def each(self, value: Any) -> dict[int, Any]:
        """Return a copy of the value for each client."""
        return {i: copy.copy(value) for i in self.everyone}


@dataclass
class Result:
    """After every round: the global weights, each watched client's personal ones, and what else is
    told; per round and cohort member: hits.

    margins: how far, relatively, anything lies from a threshold. counts: entries at each selection.
    """

    shared: list[Any] = field(default_factory=list)
    personal: list[Any] = field(default_factory=list)
    extras: list[dict[str, Any]] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


class Turn(NamedTuple):
    """A client's part in a round, and the global weights at that time."""

    t: int
    i: int
    shared: Any


def load(s: Setting, weights: Weights) -> nn.Module:
    """Copy the module with these values, without the hooks that `copy.deepcopy` asks for."""
    return copy_module(s.module, weights)


def copy_module(module: nn.Module, weights: Weights, prefix: str = "") -> nn.Module:
    twin = copy.copy(module)
    twin._parameters = {
        name: None
        if own is None
        else nn.Parameter(weights[prefix + name].clone(), own.requires_grad)
        for name, own in module._parameters.items()
    }
    twin._buffers = {
        name: None if own is None else weights[prefix + name].clone()
        for name, own in module._buffers.items()
    }
    twin._modules = {
        name: copy_module(part, weights, f"{prefix}{name}.")
        for name, part in module._modules.items()
    }
    return twin


def values_of(model: nn.Module) -> Weights:
    """Return a copy of a model's parameters and statistics."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def still(s: Setting, weights: Weights) -> nn.Module:
    return load(s, weights).eval().requires_grad_(False)


def features(model: nn.Module, x: Tensor) -> Tensor:
    """What enters the classifier."""
    x = F.avg_pool2d(torch.tanh(model.norm(model.conv(x))), 2)
    return torch.tanh(model.fc(x.flatten(1)))


def minibatches(
    s: Setting,
    turn: Turn,
    epochs: Iterable[int],
    numbers: Callable[[int, int, int], Tensor] | None = None,
) -> Iterator[tuple[Tensor, ...]]:
    """Images and labels in the round's order; a lone sample is left out.

    numbers: what samples are given besides, by round, client and epoch, in the epoch's order.
    """
    client = s.clients[turn.i]
    for epoch in epochs:
        rows = s.order(turn.t, turn.i, epoch, len(client.y))
        parts = [client.x[rows], client.y[rows]]
        if numbers:
            parts.append(numbers(turn.t, turn.i, epoch))
        for batch in zip(*(part.split(s.batch_size) for part in parts), strict=False):
            if len(batch[0]) > 1:
                yield batch


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def fit(
    s: Setting,
    model: nn.Module,
    batches: Iterable[tuple[Any, ...]],
    loss: Callable[..., Tensor] = cross_entropy,
    groups: list[dict[str, Any]] | None = None,
    after_gradient: Callable[[nn.Module], None] | None = None,
    after_step: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None,
) -> nn.Module:
    """Take a step of SGD on `loss(model, *batch)` for each batch."""
    values = {"lr": s.lr, "momentum": s.momentum, "weight_decay": s.weight_decay}
    optimizer = torch.optim.SGD(
        groups or [p for p in model.parameters() if p.requires_grad], **values
    )
    for batch in batches:
        optimizer.zero_grad()
        loss(model, *batch).backward()
        if after_gradient:
            after_gradient(model)
        optimizer.step()
        if after_step:
            with torch.no_grad():
                after_step(model, optimizer)
    return model


def train(
    s: Setting,
    weights: Weights,
    turn: Turn,
    epochs: int | None = None,
    anchor: Weights | None = None,
    lam: float = 0.0,
    is_moving: Callable[[str], bool] = lambda name: True,
    first: int = 0,
    is_still: bool = False,
    after_gradient: Callable[[nn.Module], None] | None = None,
    **values: Any,
) -> Weights:
    """LocalTrain: epochs of SGD on `loss(model, x, y)`.

    anchor: the gradient of lam/2 |v - anchor|^2 is added. is_moving: which parameters are optimised.
    first: the number of the first epoch's order. is_still: with the model in evaluation mode.
    """
    model = load(s, weights).train(not is_still)
    for name, p in model.named_parameters():
        p.requires_grad_(is_moving(name))

    def add_pull(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            p.grad += lam * (p.detach() - anchor[name])

    batches = minibatches(s, turn, range(first, first + (s.epochs if epochs is None else epochs)))
    pull = after_gradient if anchor is None else add_pull
    return values_of(fit(s, model, batches, after_gradient=pull, **values))


def put_back(masks: Weights, old: Weights) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    """After a step, entries outside the masks are as they were, and have no momentum."""

    def after_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for name, p in model.named_parameters():
            p.copy_(torch.where(masks[name], p, old[name]))
            optimizer.state[p]["momentum_buffer"] *= masks[name]

    return after_step


def count_hits(logits: Tensor, y: Tensor) -> int:
    return int((logits.argmax(1) == y).sum())


def hits(s: Setting, weights: Weights, i: int) -> int:
    with torch.no_grad():
        return count_hits(load(s, weights).eval()(s.clients[i].test_x), s.clients[i].test_y)


def mean(uploads: Iterable[Any], shares: Iterable[float] | None = None) -> Any:
    """Sum a_i theta_i, in float64; of several networks each. By default shares are equal."""
    uploads = list(uploads)
    pairs = list(zip(shares or [1 / len(uploads)] * len(uploads), uploads, strict=True))
    if not isinstance(pairs[0][1], dict):
        return sum(share * leaf.double() for share, leaf in pairs).float()
    parts = {name: [upload[name] for _, upload in pairs] for name in pairs[0][1]}
    return {name: mean(own, [share for share, _ in pairs]) for name, own in parts.items()}


def mean_by_entry(old: Weights, models: Iterable[Weights], counts: list[Weights]) -> Weights:
    """Mean over the models, of which each entry counts as much as is said; else it stays."""
    pairs, out = list(zip(counts, models, strict=True)), dict(old)
    for name in counts[0]:
        total = sum(count[name] * model[name].double() for count, model in pairs)
        weight = sum(count[name] for count in counts)
        out[name] = torch.where(weight > 0, total / weight, old[name]).to(old[name].dtype)
    return out


def average(s: Setting, trained: dict[int, Any]) -> Any:
    """Weigh clients by their samples."""
    total = sum(len(s.clients[i].y) for i in trained)
    return mean(trained.values(), [len(s.clients[i].y) / total for i in trained])


def pick(weights: Weights, chosen: Callable[[str], bool]) -> Weights:
    return {name: leaf for name, leaf in weights.items() if chosen(name)}


def stack(rows: Iterable[Weights]) -> Weights:
    rows = list(rows)
    return {k: torch.stack([row[k] for row in rows]) for k in rows[0]}


def map_leaves(f: Callable[[Tensor], Any], values: Any) -> Any:
    """Apply `f` to the tensors of nested dicts."""
    if not isinstance(values, dict):
        return f(values)
    return {name: map_leaves(f, part) for name, part in values.items()}


def leaves_of(values: Any) -> list[Tensor]:
    if not isinstance(values, dict):
        return [values]
    return [leaf for part in values.values() for leaf in leaves_of(part)]


def trainable(values: Any) -> Any:
    return map_leaves(lambda leaf: leaf.detach().clone().requires_grad_(), values)


def detached(values: Any) -> Any:
    return map_leaves(lambda leaf: leaf.detach().clone(), values)


def flat(weights: Weights, names: Iterable[str]) -> Tensor:
    return torch.cat([weights[name].double().flatten() for name in names])


def play(
    s: Setting,
    local: Callable[[Any, Turn], Any] | None = None,
    begin: Callable[[Turn], Any] | None = None,
    merge: Callable[[Any, dict[int, Any], int], Any] | None = None,
    personal: Callable[[Turn], Any] | None = None,
    after: Callable[[int, Any], Any] | None = None,
    judge: Callable[[Any, int], int] | None = None,
    shared: Any = None,
    extras: Callable[[Any], dict[str, Any]] | None = None,
    groups: Callable[[int, list[int]], list[list[int]]] = lambda t, cohort: [cohort],
    result: Result | None = None,
    own: dict[int, Any] | None = None,
    parts: Callable[[Any, int], Any] = lambda shared, i: shared,
    logits: Callable[[Any, int], Tensor] | None = None,
) -> Result:
    """Play the rounds of a method.

    begin: what a client begins with, and is judged by before; `personal` the same between rounds.
    local: what it has trained (by LocalTrain), by `after` of which it is judged afterwards.
    parts: where these are the global weights, or what it has trained, beside what is its own.
    own: where to note what clients have trained; they are evaluated by that, if it has all.
    merge: the new global weights of the old ones and what was trained (the mean by samples).
    judge: hits on a client's test images; `logits`: what is said of them. extras: what else the
    new global weights come with. groups: whose training ends with a merge before the next ones
    begin, by round and cohort.
    """
    result, shared = result or Result(), s.initial if shared is None else shared
    local = local or (lambda weights, turn: train(s, weights, turn))
    begin = begin or (lambda turn: parts(turn.shared, turn.i))
    after = after or (lambda i, trained: parts(trained, i))
    if logits:
        judge = judge or (lambda own, i: count_hits(logits(own, i), s.clients[i].test_y))
        personal = personal or (lambda turn: {"logits": logits(begin(turn), turn.i)})
    judge = judge or (lambda weights, i: hits(s, weights, i))
    if personal is None:
        personal = (lambda turn: own[turn.i]) if own else begin
    for t, cohort in enumerate(s.cohorts, 1):
        hits_before, hits_after = dict[int, int](), dict[int, int]()
        for members in groups(t, cohort):
            turns = [Turn(t, i, shared) for i in members]
            starts = {turn.i: begin(turn) for turn in turns}
            hits_before |= {i: judge(starts[i], i) for i in members}
            trained = {turn.i: local(starts[turn.i], turn) for turn in turns}
            if own is not None:
                own.update(trained)
            hits_after |= {i: judge(after(i, trained[i]), i) for i in members}
            shared = merge(shared, trained, t) if merge else average(s, trained)
        result.before.append([hits_before[i] for i in cohort])
        result.after.append([hits_after[i] for i in cohort])
        result.shared.append(shared)
        result.personal.append({i: personal(Turn(t, i, shared)) for i in WATCHED})
        if extras:
            result.extras.append(copy.deepcopy(extras(shared)))
    return result


def split(
    s: Setting,
    is_own: Callable[[str], bool],
    local: Callable[[Weights, Turn], Weights] | None = None,
) -> Result:
    """Let clients keep the entries that are their own; the others are averaged."""
    kept = s.each(pick(s.initial, is_own))

    def train_parts(weights: Weights, turn: Turn) -> Weights:
        end = local(weights, turn) if local else train(s, weights, turn)
        kept[turn.i] = pick(end, is_own)
        return pick(end, lambda name: not is_own(name))

    return play(
        s,
        train_parts,
        parts=lambda shared, i: {**shared, **kept[i]},
        shared=pick(s.initial, lambda name: not is_own(name)),
    )


def replace(s: Setting, **values: Any) -> Setting:
    return dataclasses.replace(s, **values)
