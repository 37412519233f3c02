"""Work of several calls side by side: what may become one batched program, how it joins and parts again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpfl import tree
from fedpfl.data.federation import Federation
from fedpfl.engine.keys import Draws
from fedpfl.engine.sgd import Lesson
from fedpfl.methods import Method
from fedpfl.tree import Tree


class Row(NamedTuple):
    """One client in a program."""

    federation: Federation
    client: int


@dataclass(frozen=True)
class Exam:
    """Models to judge; row i of every stacked tree belongs to `rows[i]`."""

    method: Method
    rows: list[Row]
    params: Tree
    buffers: dict[str, Tree]

    def kind(self) -> tuple[Any, ...]:
        """Exams of equal kind are one program: the same images, predictions and form of trees."""
        asker = self.method.judged_role if type(self.method).predict is Method.predict else self.method
        return asker, _images(self.rows), _form(self.params), _form(self.buffers)


@dataclass(frozen=True)
class Study:
    """Local training to do; row i of every stacked tree belongs to `rows[i]`.

    servers: `{"server": stacked}` where the rows have different ones, else empty, and `server` is everyone's.
    """

    method: Method
    rows: list[Row]
    draws: list[Draws]
    lesson: Lesson
    start: Tree
    server: Tree
    mine: dict[str, Tree]
    buffers: dict[str, Tree]
    servers: dict[str, Tree]

    @property
    def plain(self) -> bool:
        """Whether what is minimised looks at the trained tree alone, so that whose method it is does not matter."""
        method = type(self.method)
        own = method.loss is not Method.loss or method.predict is not Method.predict
        own = own or self.lesson.observe is not None or self.lesson.step is not None
        return not own and not any(phase.loss for phase in self.lesson.phases)

    def kind(self) -> tuple[Any, ...]:
        """Studies of equal kind are one program: the same images, objective and steps, and form of trees."""
        asker = self.method.judged_role if self.plain else self.method
        phases = [
            (phase.epochs, phase.stream, phase.lr, phase.momentum, phase.skip is None, _mask_form(phase.mask))
            for phase in self.lesson.phases
        ]
        forms = _form(self.start), _form(self.buffers)
        return asker, self.lesson.tuned, _images(self.rows), self.lesson.local, phases, *forms


@dataclass(frozen=True)
class End:
    """Trained trees, `mine` and buffers after a study, and the mean loss of each client's steps, stacked."""

    trained: Tree
    mine: dict[str, Tree]
    buffers: dict[str, Tree]
    loss: Tensor
    kept: list[Tree] | None = None
    """What each row's objective returned beside the loss, of all its steps in turn; {} where it took none."""


def by_kind(work: Callable[[list[Any]], list[Any]], items: Sequence[Any]) -> list[Any]:
    """The results of `work`, in order, which is given all items of a kind together."""
    kinds: list[tuple[Any, list[int]]] = []
    for place, item in enumerate(items):
        kind = item.kind()
        group = next((places for known, places in kinds if known == kind), None)
        if group is None:
            kinds.append((kind, group := []))
        group.append(place)
    results: dict[int, Any] = {}
    for _, places in kinds:
        results |= zip(places, work([items[place] for place in places]), strict=True)
    return [results[place] for place in range(len(items))]


def join(studies: list[Study]) -> tuple[Study, Tensor]:
    """Studies of one kind as one, the clients with most samples first; and where each row went, `[rows]`."""
    first = studies[0]
    rows = [row for study in studies for row in study.rows]
    draws = [draws for study in studies for draws in study.draws]
    sizes = torch.tensor([int(row.federation.train_sizes[row.client]) for row in rows])
    order = sizes.argsort(descending=True, stable=True)

    def joined(trees: Sequence[Tree]) -> Tree:
        return reorder(concatenate(trees), order)

    def joined_masks(*leaves: Any) -> Any:
        return joined(leaves) if isinstance(leaves[0], Tensor) else leaves[0]

    phases = []
    for i, phase in enumerate(first.lesson.phases):
        own = [study.lesson.phases[i] for study in studies]
        skip = None if phase.skip is None else joined([other.skip for other in own])
        phases.append(phase._replace(mask=tree.map(joined_masks, *(other.mask for other in own)), skip=skip))
    servers: dict[str, Tree] = {}
    mine: dict[str, Tree] = {}
    if not first.plain:
        servers = {"server": joined([tree.repeat(study.server, len(study.rows)) for study in studies])}
        mine = joined([study.mine for study in studies])
    study = Study(
        first.method,
        [rows[i] for i in order.tolist()],
        [draws[i] for i in order.tolist()],
        replace(first.lesson, phases=phases),
        joined([study.start for study in studies]),
        {},
        mine,
        joined([study.buffers for study in studies]),
        servers,
    )
    return study, order.argsort()


def part(end: End, places: Tensor, studies: list[Study]) -> list[End]:
    """Undo `join`: each study's own rows. What plain studies keep per client has not changed."""
    whole = {"trained": end.trained, "mine": end.mine, "buffers": end.buffers, "loss": end.loss}
    counts = [len(study.rows) for study in studies]
    own = divide(reorder(whole, places), counts)
    ends = [
        End(**{**fields, "mine": study.mine if study.plain else fields["mine"]})
        for study, fields in zip(studies, own, strict=True)
    ]
    if end.kept is None:
        return ends
    kept = iter([end.kept[place] for place in places.tolist()])
    return [replace(own, kept=list(islice(kept, count))) for own, count in zip(ends, counts, strict=True)]


def concatenate(stacked: Sequence[Tree]) -> Tree:
    """Stacked trees of one form, one after another on axis 0; a single one as it is."""
    return tree.map(lambda *leaves: torch.cat(leaves), *stacked) if len(stacked) > 1 else stacked[0]


def reorder(stacked: Tree, order: Tensor) -> Tree:
    """Row i of the result is row `order[i]`."""
    return tree.map(lambda leaf: leaf[order.to(leaf.device)], stacked)


def divide(stacked: Tree, counts: list[int]) -> list[Tree]:
    """Undo `concatenate`: views of `counts` rows each."""
    ends = torch.tensor(counts).cumsum(0).tolist()
    return [tree.take(stacked, slice(end - count, end)) for count, end in zip(counts, ends, strict=True)]


def _images(rows: list[Row]) -> tuple[Any, ...]:
    federation = rows[0].federation
    return id(federation.x), federation.mean, federation.std, federation.augment


def _form(stacked: Tree) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, leaf.shape[1:], leaf.dtype) for name, leaf in tree.items(stacked)]


def _mask_form(mask: Tree) -> list[tuple[str, Any]]:
    return [(name, "entries" if isinstance(leaf, Tensor) else leaf) for name, leaf in tree.items(mask)]
