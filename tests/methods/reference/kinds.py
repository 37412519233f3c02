"""Methods for clients with networks of different kinds; here all have one.

Sources: arXiv:2303.13137 (FedGH), 2401.03230 and the authors' code (FedTGP), 1811.11479 (FD).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference import plain
from tests.methods.reference.heads import CLASSES, WIDTH, class_means, is_body, is_head
from tests.methods.reference.plain import Result, Setting, Turn, Weights

Pairs = list[tuple[Tensor, int]]
Shuffle = Callable[[int, int], Iterable[list[int]]]
"""`shuffle(t, count)`: the server's order of so many pairs, an epoch after the other."""


def list_pairs(prototypes: dict[int, dict[int, Tensor]]) -> Pairs:
    """Prototypes of the cohort, client by client, in the order of their classes."""
    return [(own[c], c) for own in prototypes.values() for c in sorted(own)]


def fit_server(
    method: Any, model: nn.Module, loss: Callable, pairs: Pairs, orders: Iterable[list[int]]
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=method.server_lr)
    for order in orders:
        for start in range(0, len(order), method.server_batch):
            chosen = [pairs[row] for row in order[start : start + method.server_batch]]
            optimizer.zero_grad()
            z, y = torch.stack([z for z, _ in chosen]), torch.tensor([c for _, c in chosen])
            loss(model, z, y).backward()
            optimizer.step()


def fedgh(s: Setting, method: Any, shuffle: Shuffle) -> Result:
    bodies = s.each(plain.pick(s.initial, is_body))
    prototypes: dict[int, dict[int, Tensor]] = {}

    def local(w: Weights, turn: Turn) -> Weights:
        trained = plain.train(s, w, turn)
        bodies[turn.i] = plain.pick(trained, is_body)
        prototypes[turn.i] = class_means(s, trained, turn.i)
        return trained

    def merge(shared: Weights, trained: dict[int, Any], t: int) -> Weights:
        head = nn.Linear(WIDTH, CLASSES)
        head.load_state_dict({k.partition(".")[2]: v for k, v in shared.items()})
        pairs = list_pairs({i: prototypes[i] for i in trained})
        loss = lambda model, z, y: F.cross_entropy(model(z), y)  # noqa: E731
        fit_server(method, head, loss, pairs, shuffle(t, len(pairs)))
        return {f"classifier.{k}": v.detach().clone() for k, v in head.state_dict().items()}

    return plain.play(
        s,
        local,
        merge=merge,
        parts=lambda head, i: {**bodies[i], **plain.pick(head, is_head)},
        shared=plain.pick(s.initial, is_head),
    )


def fedtgp(s: Setting, method: Any, shuffle: Shuffle, maker: Any) -> Result:
    """`maker`: the initial embeddings and linear maps."""
    own, prototypes = s.each(s.initial), dict[int, dict[int, Tensor]]()
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    network.register_parameter("embeddings", nn.Parameter(maker["embeddings"].clone()))
    network[0].load_state_dict(maker["first"])
    network[2].load_state_dict(maker["last"])
    known: list[Tensor] = []

    def local(w: Weights, turn: Turn) -> Weights:
        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = plain.features(model, x)
            pull = F.mse_loss(z, torch.stack([known[c] for c in y.tolist()])) if known else 0.0
            return F.cross_entropy(model.classifier(z), y) + method.lam * pull

        own[turn.i] = plain.train(s, w, turn, loss=loss)
        prototypes[turn.i] = class_means(s, own[turn.i], turn.i)
        return own[turn.i]

    def merge(_: Any, trained: dict[int, Any], t: int) -> Weights:
        pairs = list_pairs({i: prototypes[i] for i in trained})
        centres = {}
        for c in {c for _, c in pairs}:
            centres[c] = torch.stack([z for z, own in pairs if own == c]).mean(0)
        gaps = [
            min(float((centres[a] - centres[b]).norm()) for b in centres if b != a) for a in centres
        ]
        margin = min(max(gaps), method.tau)

        def loss(model: Any, z: Tensor, y: Tensor) -> Tensor:
            made, total = model(model.embeddings), torch.zeros(())
            for row, c in zip(z, y.tolist(), strict=True):
                far = torch.stack(
                    [(row - p).norm() + margin * (j == c) for j, p in enumerate(made)]
                )
                total = total + far[c] + (-far).logsumexp(0)
            return total / len(z)

        fit_server(method, network, loss, pairs, shuffle(t, len(pairs)))
        known[:] = network(network.embeddings).detach()
        return {}

    def judge(w: Weights, i: int) -> int:
        client, model = s.clients[i], plain.still(s, w)
        z = plain.features(model, client.test_x)
        if not known:
            return plain.count_hits(model.classifier(z), client.test_y)
        square = torch.stack([(z - p).square().sum(1) for p in known], 1)
        return plain.count_hits(-square, client.test_y)

    return plain.play(
        s,
        local,
        begin=lambda turn: own[turn.i],
        merge=merge,
        judge=judge,
        extras=lambda _: {"mean": torch.stack(known)},
    )


def fd(s: Setting, method: Any) -> Result:
    """`latest`: for each class who had it last, and what they said."""
    own, said = s.each(s.initial), dict[int, dict[int, Tensor]]()
    latest: dict[int, dict[int, Tensor]] = {}

    def teacher(i: int, c: int) -> Tensor | None:
        rows = [row for k, row in latest.get(c, {}).items() if method.teacher == "all" or k != i]
        return sum(rows) / len(rows) if rows else None

    def local(w: Weights, turn: Turn) -> Weights:
        notes: dict[int, list[Tensor]] = {}

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            logits, total = model(x), torch.zeros(())
            for row, c in zip(logits, y.tolist(), strict=True):
                target = teacher(turn.i, c)
                if target is not None:
                    total = total - (target * row.log_softmax(0)).sum()
                output = row if method.outputs == "logits" else row.softmax(0)
                notes.setdefault(c, []).append(output.detach().clone())
            return F.cross_entropy(logits, y) + method.lam * total / len(y)

        own[turn.i] = plain.train(s, w, turn, loss=loss)
        said[turn.i] = {c: torch.stack(rows).mean(0) for c, rows in notes.items()}
        return own[turn.i]

    def merge(_: Any, trained: dict[int, Any], t: int) -> Weights:
        for c in {c for i in trained for c in said[i]}:
            latest[c] = {i: said[i][c] for i in trained if c in said[i]}
        return {}

    def extras(_: Any) -> dict[str, Any]:
        rows = [latest.get(c, {}) for c in range(CLASSES)]
        sums = [sum(row.values()) if row else torch.zeros(CLASSES) for row in rows]
        return {"sum": torch.stack(sums), "count": torch.tensor([float(len(row)) for row in rows])}

    return plain.play(s, local, begin=lambda turn: own[turn.i], merge=merge, extras=extras)
