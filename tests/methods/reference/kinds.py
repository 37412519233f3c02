"""Methods for clients with networks of different kinds; here all have one.

Sources: arXiv:2303.13137 (FedGH), 2401.03230 and the authors' code (FedTGP), 1811.11479 (FD),
2006.16765 (FML), 2108.13323 and the authors' code (FedKD), 2406.00488 (FedMRL).
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
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


def common_network(weights: Weights) -> nn.Sequential:
    """The smaller network that all have beside their own."""
    hidden, classes = weights["1.weight"], weights["3.weight"]
    layers = nn.Linear(*hidden.T.shape), nn.Tanh(), nn.Linear(*classes.T.shape)
    network = nn.Sequential(nn.Flatten(), *layers)
    network.load_state_dict(weights)
    return network


def beside(
    s: Setting,
    common: Weights,
    loss: Callable[..., Tensor],
    logits: Callable[[nn.ModuleDict, Tensor], Tensor] | None = None,
    extra: nn.Module | None = None,
    merge: Callable[[Weights, dict[int, Any], int], Weights] | None = None,
) -> Result:
    """Train each client's own network, and what else it keeps, together with the common one.

    loss: of the networks (`own`, `common`, `extra`) and a batch. logits: by which a client is
    evaluated, if not by its own network alone.
    """
    own, extras = s.each(s.initial), s.each(extra.state_dict() if extra else {})

    def load(w: Weights, i: int) -> nn.ModuleDict:
        nets = nn.ModuleDict({"own": plain.load(s, own[i]), "common": common_network(w)})
        if extra:
            nets["extra"] = nn.Linear(
                extra.in_features, extra.out_features, bias=extra.bias is not None
            )
            nets["extra"].load_state_dict(extras[i])
        return nets

    def local(_: Any, turn: Turn) -> Weights:
        nets = load(turn.shared, turn.i).train()
        plain.fit(s, nets, plain.minibatches(s, turn, range(s.epochs)), loss)
        own[turn.i] = plain.values_of(nets["own"])
        extras[turn.i] = plain.values_of(nets["extra"]) if extra else {}
        return plain.values_of(nets["common"])

    def said(w: Weights, i: int) -> Tensor:
        with torch.no_grad():
            return logits(load(w, i).eval(), s.clients[i].test_x)

    values: dict[str, Any] = {"logits": said} if logits else {"parts": lambda _, i: own[i]}
    if logits:
        values["parts"] = lambda w, i: w
    return plain.play(s, local, merge=merge, shared=common, **values)


def fml(s: Setting, method: Any, common: Weights) -> Result:
    """KL(teacher || student) written out, from probabilities that are given."""

    def distance(teacher: Tensor, student: Tensor) -> Tensor:
        p, q = teacher.detach().softmax(1), student.softmax(1)
        return (p * (p / q).log()).sum() / len(p)

    def loss(nets: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
        f, g = nets["own"](x), nets["common"](x)
        private = method.alpha * F.cross_entropy(f, y) + (1 - method.alpha) * distance(g, f)
        shared = method.beta * F.cross_entropy(g, y) + (1 - method.beta) * distance(f, g)
        return private + shared

    return beside(s, common, loss)


def fedmrl(s: Setting, method: Any, common: Weights, projector: Weights) -> Result:
    width = common["3.weight"].shape[1]
    linear = nn.Linear(width + WIDTH, WIDTH)
    linear.load_state_dict(projector)

    def fuse(nets: nn.ModuleDict, x: Tensor) -> Tensor:
        own = plain.features(nets["own"], x)
        return nets["extra"](torch.cat([nets["common"][:3](x), own], 1))

    def loss(nets: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
        z = fuse(nets, x)
        logits = nets["own"].classifier(z), nets["common"][3](z[:, :width])
        return F.cross_entropy(logits[0], y) + F.cross_entropy(logits[1], y)

    return beside(s, common, loss, lambda nets, x: nets["own"].classifier(fuse(nets, x)), linear)


def fedkd(s: Setting, method: Any, common: Weights, linear: Tensor, rounds: int) -> Result:
    """`linear`: the initial map of the student's features. SVD by numpy."""
    extra = nn.Linear(*linear.T.shape, bias=False)
    extra.load_state_dict({"weight": linear})
    margins: list[float] = []

    def loss(nets: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
        z, small = plain.features(nets["own"], x), nets["common"][:3](x)
        f, g = nets["own"].classifier(z), nets["common"][3](small)
        p, q = f.softmax(1), g.softmax(1)
        total = F.cross_entropy(f, y) + F.cross_entropy(g, y)
        both = (p * (p / q).log()).mean() + (q * (q / p).log()).mean()
        return total + (both + 2 * F.mse_loss(nets["extra"](small), z)) / total

    def cut(update: Weights, t: int) -> Weights:
        energy = method.energy_start + (method.energy_end - method.energy_start) * (t - 1) / rounds
        out = dict(update)
        for name, leaf in update.items():
            if leaf.dim() > 1 and bool(leaf.any()):
                left, values, right = np.linalg.svd(leaf.double().numpy(), full_matrices=False)
                shares = (values**2).cumsum() / (values**2).sum()
                margins.append(float(abs(shares - energy).min()))
                rank = int((shares <= energy).sum()) + 1
                low = (left[:, :rank] * values[:rank]) @ right[:rank]
                out[name] = torch.tensor(low, dtype=leaf.dtype)
        return out

    def merge(shared: Weights, trained: dict[int, Weights], t: int) -> Weights:
        base = plain.map_leaves(
            lambda leaf: leaf if method.compress == "updates" else torch.zeros_like(leaf), shared
        )
        updates = {i: cut({k: w[k] - base[k] for k in w}, t) for i, w in trained.items()}
        moved = cut(plain.average(s, updates), t)
        return {k: base[k] + moved[k] for k in base}

    result = beside(s, common, loss, extra=extra, merge=merge)
    result.margins = margins
    return result
