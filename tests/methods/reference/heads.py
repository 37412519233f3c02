"""Methods that know a network's features and its head.

Sources: CVPR 2024 (FedAS), arXiv:2107.00778 (FedRoD), 2406.04596 (FLUTE), 2306.11867 (FedPAC),
2105.00243 (FedProto), 2307.01217 (FedCP), 2308.10279 (GPFL), 2311.14975 and the authors' code
(FedDBE), 2105.10056 (FedGen), 2403.03333 (FLOCO), 2411.00329 (pFedFDA).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize, nnls
from torch import Tensor, nn

from tests.methods.reference import masks, plain
from tests.methods.reference.plain import HEAD, Order, Result, Setting, Turn, Weights

CLASSES, WIDTH = 5, 12
EPS = 1e-4


def is_head(name: str) -> bool:
    return name in HEAD


def is_body(name: str) -> bool:
    return name not in HEAD


def class_counts(s: Setting, i: int) -> Tensor:
    return torch.bincount(s.clients[i].y, minlength=CLASSES).float()


def class_means(s: Setting, weights: Weights, i: int) -> dict[int, Tensor]:
    z, y = plain.features(plain.still(s, weights), s.clients[i].x), s.clients[i].y
    return {c: z[y == c].mean(0) for c in y.unique().tolist()}


def fedas(s: Setting, method: Any, order: Order) -> Result:
    """`order` deals the samples of the alignment; a copy of the received body takes its steps."""
    m, models = method, dict[int, Weights]()
    own = [k for k in s.initial if k in HEAD or "running" in k or "batches" in k]

    def received(turn: Turn) -> Weights:
        old = models.get(turn.i, s.initial)
        return {**turn.shared, **{k: old[k] for k in own}}

    def align(weights: Weights, targets: dict[int, Tensor], turn: Turn) -> Weights:
        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z, total = plain.features(model, x), torch.zeros(())
            for c in y.unique().tolist():
                mine = z[y == c].mean(0, keepdim=True) if m.align == "means" else z[y == c]
                total = total + F.mse_loss(mine, targets[c].expand_as(mine))
            return total

        descent = plain.replace(s, order=order, lr=m.align_lr, momentum=0.0, weight_decay=0.0)
        values = {"is_moving": is_body, "is_still": True, "loss": loss}
        return plain.train(descent, weights, turn, m.align_epochs, **values)

    def local(start: Weights, turn: Turn) -> Weights:
        if turn.i in models or m.first != "skip":
            old = models.get(turn.i, s.initial if m.first == "init" else start)
            start = align(start, class_means(s, old, turn.i), turn)
        return plain.train(s, start, turn)

    def fisher(weights: Weights, i: int) -> float:
        squares = masks.fisher(s, weights, i, s.batch_size)  # the mean over batches
        count = len(s.clients[i].y.split(s.batch_size))
        return count * float(plain.flat(squares, squares).sum())

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        if m.weights == "samples":
            return plain.average(s, trained)
        traces = [fisher(w, i) for i, w in trained.items()]
        return plain.mean(trained.values(), [trace / sum(traces) for trace in traces])

    def personal(turn: Turn) -> Weights:
        return models.get(turn.i, s.initial) if m.judge == "stored" else received(turn)

    return plain.play(s, local, received, merge, personal, own=models)


def fedrod(s: Setting, method: Any) -> Result:
    """`extras`: every client's personal head; zeros until it was trained."""
    heads: dict[int, Weights] = {}
    none = {k: torch.zeros_like(s.initial[k]) for k in HEAD}

    def local(_: Any, turn: Turn) -> Weights:
        model, counts = plain.load(s, turn.shared).train(), class_counts(s, turn.i)
        own = plain.trainable(plain.pick(heads.get(turn.i, s.initial), is_head))

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            """-sum log of n^gamma e^logit over its sum, written out; and the personal one."""
            z = plain.features(model, x)
            logits = model.classifier(z)
            rising = counts**method.gamma * logits.exp()
            generic = -(rising[range(len(y)), y] / rising.sum(1)).log().mean()
            both = logits.detach() + F.linear(z.detach(), *own.values())
            return generic + F.cross_entropy(both, y)

        batches = list(plain.minibatches(s, turn, range(s.epochs)))
        groups = [{"params": [*model.parameters(), *own.values()]}]
        if batches:
            plain.fit(s, model, batches, loss, groups)
            heads[turn.i] = plain.detached(own)
        return plain.values_of(model)

    def parts(shared: Weights, i: int) -> tuple[Weights, Weights]:
        return shared, heads.get(i, none)

    def judge(it: tuple[Weights, Weights], i: int) -> int:
        model, (weight, bias) = plain.still(s, it[0]), it[1].values()
        z = plain.features(model, s.clients[i].test_x)
        return plain.count_hits(model.classifier(z) + z @ weight.T + bias, s.clients[i].test_y)

    personal = lambda turn: {"w": turn.shared, "q": heads.get(turn.i, none)}  # noqa: E731
    return plain.play(s, local, personal=personal, judge=judge, parts=parts)


def collapse(weight: Tensor, present: Tensor) -> Tensor:
    c, gram, u = len(weight), weight @ weight.T, present.float()
    target = (torch.eye(c) - torch.ones(c, c) / c) / (c - 1) ** 0.5 * torch.outer(u, u)
    return torch.linalg.norm(gram / torch.linalg.norm(gram) - target)


def flute(s: Setting, method: Any) -> Result:
    """One optimizer for both phases: the head's momentum goes on."""
    m = method
    heads = s.each(plain.pick(s.initial, is_head))
    present = {i: class_counts(s, i) > 0 for i in s.everyone}

    def local(w: Weights, turn: Turn) -> Weights:
        def loss(model: nn.Module, x: Tensor, y: Tensor, is_last: bool) -> Tensor:
            for k, p in model.train(is_last).named_parameters():
                p.requires_grad_(is_last or k in HEAD)
            z, weight = plain.features(model, x), model.classifier.weight
            value = F.cross_entropy(model.classifier(z), y)
            value = value + m.l1 * collapse(weight, present[turn.i])
            value = value + m.l2 * torch.linalg.norm(weight) ** 2
            return value + (m.l3 * torch.linalg.norm(z) ** 2 if is_last else 0.0)

        middle = s.epochs - m.rep_epochs
        first = [(*batch, False) for batch in plain.minibatches(s, turn, range(middle))]
        last = [(*batch, True) for batch in plain.minibatches(s, turn, range(middle, s.epochs))]
        end = plain.values_of(plain.fit(s, plain.load(s, w), first + last, loss))
        heads[turn.i] = plain.pick(end, is_head)
        return plain.pick(end, is_body)

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        for i in trained:
            weight = heads[i][HEAD[0]].requires_grad_()
            (slope,) = torch.autograd.grad(collapse(weight, present[i]) / len(trained), weight)
            heads[i] |= {HEAD[0]: (weight - m.server_lr * slope).detach()}
        return plain.average(s, trained)

    parts = lambda shared, i: {**shared, **heads[i]}  # noqa: E731
    shared = plain.pick(s.initial, is_body)
    return plain.play(s, local, merge=merge, parts=parts, shared=shared)


def best_mixture(quadratic: Tensor) -> Tensor:
    """Over the simplex, which is by non-negative least squares but for the sum of the shares; a
    client of one sample has no variance.
    """
    factor = np.linalg.cholesky(quadratic.numpy() + 1e-12 * np.eye(len(quadratic))).T
    rows, ones = np.vstack([factor, np.ones(len(factor))]), np.append(np.zeros(len(factor)), 1.0)
    shares = nnls(rows, ones)[0]
    return torch.from_numpy(shares / shares.sum())


def fedpac(s: Setting, method: Any) -> Result:
    """`margins`: how far shares lie from the limit below which they are dropped."""
    result, prototypes = Result(), dict[int, Tensor]()
    heads, statistics_of, ends = s.each(plain.pick(s.initial, is_head)), {}, {}

    def statistics(weights: Weights, i: int) -> tuple[Tensor, float, dict[int, Tensor]]:
        y, means = s.clients[i].y, class_means(s, weights, i)
        z = plain.features(plain.still(s, weights), s.clients[i].x).double()
        h, v = torch.zeros(CLASSES, WIDTH, dtype=torch.float64), 0.0
        for c, own in means.items():
            share = float((y == c).double().mean())
            h[c] = share * own.double()
            v += float(share * (z[y == c] ** 2).sum(1).mean() - (h[c] ** 2).sum())
        return h, v / len(y), means

    def local(w: Weights, turn: Turn) -> Weights:
        statistics_of[turn.i] = statistics(w, turn.i)
        at = plain.replace(s, lr=method.head_lr)
        w = plain.train(at, w, turn, method.head_epochs, is_moving=is_head, is_still=True)

        def aligned(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z, means = plain.features(model, x), statistics_of[turn.i][2]
            loss = F.cross_entropy(model.classifier(z), y)
            if not prototypes:
                return loss
            target = torch.stack([prototypes.get(int(c), means[int(c)]) for c in y])
            return loss + method.lam * F.mse_loss(z, target)

        values = {"is_moving": is_body, "first": method.head_epochs, "loss": aligned}
        ends[turn.i] = plain.train(s, w, turn, method.body_epochs, **values)
        return ends[turn.i]

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        new_means = {i: class_means(s, end, i) for i, end in trained.items()}
        prototypes.clear()
        for c in sorted({c for own in new_means.values() for c in own}):
            counts = {i: class_counts(s, i)[c] for i, own in new_means.items() if c in own}
            total = sum(n * new_means[i][c] for i, n in counts.items())
            prototypes[c] = total / sum(counts.values())
        means = {i: statistics_of[i][0].flatten() for i in trained}
        variances = torch.tensor([statistics_of[i][1] for i in trained], dtype=torch.float64)
        for i in trained:
            gap = torch.stack([means[i] - means[j] for j in trained])
            shares = best_mixture(gap @ gap.T + torch.diag(variances))
            result.margins += (shares - 1e-3).abs().tolist()
            shares = torch.where(shares < 1e-3, 0, shares)
            mixed = plain.mean(trained.values(), (shares / shares.sum()).tolist())
            heads[i] = plain.pick(mixed, is_head)
        return plain.pick(plain.average(s, trained), is_body)

    begin = lambda turn: {**turn.shared, **heads[turn.i]}  # noqa: E731
    return plain.play(s, local, begin, merge, shared=plain.pick(s.initial, is_body), result=result)


def fedproto(s: Setting, method: Any) -> Result:
    """Samples one by one; `extras` has the prototypes and which there are."""
    judge, prototypes, weights = method.judge, method.prototypes, method.weights
    known, statistics_of, own = dict[int, Tensor](), {}, s.each(s.initial)

    def predict(w: Weights, i: int) -> Tensor:
        """Return the labels said of a client's test images."""
        model, client = plain.still(s, w), s.clients[i]
        z = plain.features(model, client.test_x)
        near = [c for c in known if judge == "nearest" or bool((client.y == c).any())]
        if judge == "head" or not near:
            return model.classifier(z).argmax(1)
        square = torch.stack([(z - known[c]).square().sum(1) for c in near], 1)
        return torch.tensor(near)[square.argmin(1)]

    def local(w: Weights, turn: Turn) -> Weights:
        client, pairs = s.clients[turn.i], {}

        def loss(model: nn.Module, x: Tensor, y: Tensor, epoch: int) -> Tensor:
            z, pull = plain.features(model, x), torch.zeros(())
            for row, label in zip(z, y.tolist(), strict=True):
                pull = pull + (((row - known[label]) ** 2).mean() if label in known else 0.0)
                parts = (row.detach().clone(), label)
                pairs.setdefault(epoch, []).append(parts)
            return F.cross_entropy(model.classifier(z), y) + method.lam * pull / len(y)

        epochs = range(s.epochs)
        batches = [(*b, e) for e in epochs for b in plain.minibatches(s, turn, [e])]
        model = plain.fit(s, plain.load(s, w).train(), batches, loss)
        own[turn.i] = plain.values_of(model)
        chosen = epochs if prototypes == "all_epochs" else epochs[-1:]
        rows = [pair for epoch in chosen for pair in pairs.get(epoch, [])]
        if prototypes == "final":
            z = plain.features(plain.still(s, own[turn.i]), client.x)
            rows = list(zip(z, client.y.tolist(), strict=True))
        by_class = {c: [z for z, y in rows if y == c] for c in {y for _, y in rows}}
        statistics_of[turn.i] = {c: torch.stack(z).mean(0) for c, z in by_class.items()}
        return own[turn.i]

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        for c in sorted({c for i in trained for c in statistics_of[i]}):
            those = [i for i in trained if c in statistics_of[i]]
            counts = [float(class_counts(s, i)[c]) if weights == "counts" else 1.0 for i in those]
            total = sum(n * statistics_of[i][c] for n, i in zip(counts, those, strict=True))
            known[c] = total / sum(counts)
        return {}

    def extras(_: Any) -> dict[str, Any]:
        known_rows = {str(c): row for c, row in sorted(known.items())}
        return {"mean": known_rows, "seen": torch.tensor([c in known for c in range(CLASSES)])}

    return plain.play(
        s,
        local,
        begin=lambda turn: own[turn.i],
        merge=merge,
        judge=lambda w, i: int((predict(w, i) == s.clients[i].test_y).sum()),
        extras=extras,
    )


def kernel_mmd(a: Tensor, b: Tensor) -> Tensor:
    """Over all pairs, those of a sample with itself included."""

    def kernel(one: Tensor, other: Tensor) -> Tensor:
        squared = (one[:, None] - other[None]).square().sum(2)
        return sum(torch.exp(-squared / (2 * width)) for width in (10, 15, 20, 50))

    return (kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)).mean()


def fedcp(s: Setting, method: Any, policy: Weights, noise: Callable | None) -> Result:
    """`policy`: the initial network. `noise(t, i, epoch)`: Gumbel's, `[samples, 2, d]`, in an
    epoch's order.
    """
    body, head = plain.pick(s.initial, is_body), plain.pick(s.initial, is_head)
    heads, received, lam = s.each(head), {}, method.lam

    def predict(
        model: nn.Module, policy: Weights, v: Tensor, x: Tensor, drawn: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return logits and features; v: the context. drawn: Gumbel's noise, `[batch, 2, d]`."""
        h = plain.features(model, x)
        hidden = F.linear(h * v, policy["weight"], policy["bias"])
        hidden = F.layer_norm(hidden, hidden.shape[1:], policy["scale"], policy["shift"]).relu()
        both = torch.stack(hidden.chunk(2, 1), 1)
        both = (both if drawn is None else both + drawn).exp()
        r, s = (both / both.sum(1, keepdim=True)).unbind(1)
        return model.classifier(r * h) + F.linear(s * h, *received["head"].values()), h

    def context(head: Weights) -> Tensor:
        rows = head[HEAD[0]].sum(0)
        return rows / rows.norm()

    def local(parts: tuple[Weights, Weights], turn: Turn) -> dict[str, Weights]:
        policy, v = plain.trainable(parts[1]), context(parts[0])
        model, reference = plain.load(s, parts[0]).train(), plain.still(s, parts[0])

        def loss(model: nn.Module, x: Tensor, y: Tensor, drawn: Tensor | None = None) -> Tensor:
            logits, h = predict(model, policy, v, x, drawn)
            target = plain.features(reference, x)
            return F.cross_entropy(logits, y) + (lam * kernel_mmd(h, target) if lam else 0.0)

        batches = plain.minibatches(s, turn, range(s.epochs), noise)
        everything = [{"params": [*model.parameters(), *policy.values()]}]
        end = plain.values_of(plain.fit(s, model, batches, loss, everything))
        heads[turn.i] = plain.pick(end, is_head)
        mean_head = {k: heads[turn.i][k] / 2 + received["head"][k] / 2 for k in HEAD}
        sent = {"body": plain.pick(end, is_body), "head": mean_head}
        return sent | {"policy": plain.detached(policy)}

    def logits(parts: tuple[Weights, Weights], i: int) -> Tensor:
        with torch.no_grad():
            values = plain.still(s, parts[0]), parts[1], context(parts[0])
            return predict(*values, s.clients[i].test_x)[0]

    def begin(turn: Turn) -> tuple[Weights, Weights]:
        received["head"] = turn.shared["head"]
        return {**turn.shared["body"], **heads[turn.i]}, turn.shared["policy"]

    return plain.play(
        s,
        local,
        begin,
        after=lambda i, end: ({**end["body"], **heads[i]}, end["policy"]),
        logits=logits,
        shared={"body": body, "head": head, "policy": policy},
        extras=lambda _: {"own": [dict(own) for own in heads.values()]},
    )


def open_valve(valve: dict[str, Weights], z: Tensor, condition: Tensor) -> Tensor:
    """GPFL's conditional valve."""

    def layer(own: Weights) -> Tensor:
        activations = F.linear(condition, own["weight"], own["bias"]).relu()
        return F.layer_norm(activations, (WIDTH,), own["scale"], own["shift"])

    return torch.relu(z * (layer(valve["gamma"]) + 1) + layer(valve["beta"]))


def gpfl(s: Setting, method: Any, extra: dict[str, Any]) -> Result:
    """`extra`: initial values of the valve and the embeddings."""
    heads, now = s.each(plain.pick(s.initial, is_head)), {}

    def logits(parts: tuple[Weights, Any, Tensor], i: int) -> Tensor:
        model = plain.still(s, parts[0])
        z = plain.features(model, s.clients[i].test_x)
        return model.classifier(open_valve(parts[1]["valve"], z, parts[2]))

    def begin(turn: Turn) -> tuple[Weights, Any, Tensor]:
        counts = class_counts(s, turn.i)
        now[turn.i] = counts / counts.sum() @ turn.shared["extra"]["embeddings"]
        return {**turn.shared["model"], **heads[turn.i]}, turn.shared["extra"], now[turn.i]

    def local(parts: tuple[Weights, Any, Tensor], turn: Turn) -> dict[str, Weights]:
        model, extra, own = plain.load(s, parts[0]).train(), plain.trainable(parts[1]), parts[2]
        frozen = parts[1]["embeddings"]

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = plain.features(model, x)
            personal, generic = (open_valve(extra["valve"], z, u) for u in (own, frozen.mean(0)))
            rows = extra["embeddings"]
            cosines = [F.cosine_similarity(generic, row.expand_as(generic)) for row in rows]
            gap = generic - frozen[y]
            distance = torch.linalg.norm(gap, dim=1).mean()
            if method.guidance == "frobenius":
                distance = torch.linalg.norm(gap)
            value = F.cross_entropy(model.classifier(personal), y)
            return value + F.cross_entropy(torch.stack(cosines, 1), y) + method.lam * distance

        decay = {"params": plain.leaves_of(extra), "weight_decay": s.weight_decay + method.mu}
        groups = [{"params": list(model.parameters())}, decay]
        plain.fit(s, model, plain.minibatches(s, turn, range(s.epochs)), loss, groups)
        end = plain.values_of(model)
        heads[turn.i] = plain.pick(end, is_head)
        return {"model": end, "extra": plain.detached(extra)}

    return plain.play(
        s,
        local,
        begin,
        after=lambda i, end: (end["model"], end["extra"], now[i]),
        logits=logits,
        shared={"model": s.initial, "extra": extra},
        extras=lambda _: {"head": [dict(head) for head in heads.values()]},
    )


def feddbe(s: Setting, method: Any, first: Order) -> Result:
    """`first`: batch orders of the initial pass."""
    m, u, target = method, s.each(torch.zeros(WIDTH)), torch.zeros(WIDTH)

    def step_through(
        shared: Weights, turn: Turn, order: Order, target: Tensor | None
    ) -> tuple[Weights, Tensor]:
        """Return the model and the running mean; without a target u and the regulariser are out."""
        model, running = plain.load(s, shared).train(), torch.zeros(WIDTH)
        own = u[turn.i].clone().requires_grad_()

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            nonlocal running
            z = plain.features(model, x)
            running = (1 - m.rho) * running.detach() + m.rho * z.mean(0)
            if target is None:
                return F.cross_entropy(model.classifier(z), y)
            pull = m.kappa * F.mse_loss(running, target) / 2
            return F.cross_entropy(model.classifier(z + own), y) + pull

        descent = {"params": [own], "lr": m.bias_lr, "momentum": 0.0, "weight_decay": 0.0}
        groups = [{"params": list(model.parameters())}, descent]
        batches = plain.minibatches(plain.replace(s, order=order), turn, range(s.epochs))
        plain.fit(s, model, batches, loss, groups)
        u[turn.i] = own.detach()
        return plain.values_of(model), running.detach()

    total = 0
    for i, client in enumerate(s.clients):
        own = plain.features(plain.still(s, s.initial), client.x).mean(0)
        if m.mean != "data":
            _, own = step_through(s.initial, Turn(1, i, {}), first, None)
            own = own if len(client.y) > 1 else None
        if own is not None:
            total, target = total + len(client.y), target + len(client.y) * own
    target = target / total

    def logits(weights: Weights, i: int) -> Tensor:
        model = plain.still(s, weights)
        return model.classifier(plain.features(model, s.clients[i].test_x) + u[i])

    return plain.play(
        s,
        lambda w, turn: step_through(w, turn, s.order, target)[0],
        logits=logits,
        extras=lambda _: {"mean": target, "u": torch.stack([*u.values()])},
    )


def generate(made: dict[str, Any], y: Tensor, noise: Tensor, is_training: bool) -> Tensor:
    """FedGen's features of labels and noise; in training the statistics move."""
    learned, moved = made["learned"], made["moved"]
    hidden = F.linear(torch.cat([noise, F.one_hot(y, CLASSES).float()], 1), **learned["first"])
    statistics = moved["mean"], moved["variance"]
    hidden = F.batch_norm(hidden, *statistics, **learned["norm"], training=is_training)
    return F.linear(hidden.relu(), **learned["last"])


def diversity(z: Tensor, noise: Tensor) -> Tensor:
    gap = (z[:, None] - z[None]).abs().mean(2) * (noise[:, None] - noise[None]).square().mean(2)
    return torch.exp(-gap.sum() / len(z) ** 2)


def fedgen(s: Setting, made: dict[str, Any], method: Any, random: Any, drawn: Any) -> Result:
    """`random(t, i, epoch)`: numbers `[samples, 2 noise + 1]` in an epoch's order, noise for the
    sample's label, noise for another label, and by which that is drawn. `drawn(t, labels)`: the
    server's batches of labels and noise.
    """
    m, seen = method, torch.zeros(CLASSES)
    made = {"learned": plain.trainable(made["learned"]), "moved": plain.detached(made["moved"])}
    optimizer = torch.optim.Adam(plain.leaves_of(made["learned"]), weight_decay=m.weight_decay)

    def draw_label(number: float) -> int:
        """Return the label at this place of the distribution."""
        counts = seen if m.labels == "frequency" else (seen > 0).float()
        total = 0.0
        for label, share in enumerate((counts / counts.sum()).tolist()):
            total += share
            if number < total:
                return label
        return int(seen.nonzero()[-1])

    def local(w: Weights, turn: Turn) -> Weights:
        fall = m.decay ** (turn.t - 1)
        sizes = (max(1e-4, size * fall) if size else 0.0 for size in (m.alpha, m.beta))
        other_weight, own_weight = sizes

        def loss(model: nn.Module, x: Tensor, y: Tensor, own: Tensor) -> Tensor:
            logits = model(x)
            value = F.cross_entropy(logits, y)
            if turn.t == 1:
                return value
            with torch.no_grad():
                target = model.classifier(generate(made, y, own[:, : m.noise], False)).softmax(1)
                label = torch.tensor([draw_label(float(number)) for number in own[:, -1]])
                generated = generate(made, label, own[:, m.noise : 2 * m.noise], False)
            value = value + other_weight * F.cross_entropy(model.classifier(generated), label)
            distilled = F.kl_div(logits.log_softmax(1), target, reduction="batchmean")
            return value + own_weight * distilled

        batches = plain.minibatches(s, turn, range(s.epochs), random)
        return plain.values_of(plain.fit(s, plain.load(s, w).train(), batches, loss))

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        nonlocal seen
        table = torch.stack([class_counts(s, i) for i in trained])
        models = [plain.load(s, end) for end in trained.values()]
        optimizer.param_groups[0]["lr"] = m.lr * m.decay ** (t - 1)
        for y, noise in drawn(t, (table.sum(0) > 0).nonzero().flatten().tolist()):
            generated = generate(made, y, noise, True)
            answers = torch.stack([model.classifier(generated) for model in models])
            losses = torch.stack([F.cross_entropy(a, y, reduction="none") for a in answers])
            loss = (table[:, y] / table[:, y].sum(0) * losses).sum(0).mean()
            if m.teacher == "mean_logits":
                loss = F.cross_entropy(answers.mean(0), y)
            optimizer.zero_grad()
            (loss + m.eta * diversity(generated, noise)).backward()
            optimizer.step()
        seen = seen + table.sum(0)
        return plain.average(s, trained)

    return plain.play(s, local, merge=merge, extras=lambda _: {"generator": plain.detached(made)})


def project(point: np.ndarray, z: float) -> np.ndarray:
    """Onto the simplex of this size."""
    falling, level = sorted(point, reverse=True), 0.0
    for j, value in enumerate(falling, 1):
        if value - (sum(falling[:j]) - z) / j > 0:
            level = (sum(falling[:j]) - z) / j
    return np.maximum(point - level, 0)


def centres(points: np.ndarray, count: int) -> np.ndarray:
    centred = points - points.mean(0)
    gram_values, vectors = np.linalg.eigh(centred @ centred.T)
    kappa = np.zeros((len(points), count))
    for k in range(min(count, len(points))):
        score = vectors[:, -1 - k] * math.sqrt(max(gram_values[-1 - k], 0))
        loading = centred.T @ score
        kappa[:, k] = score * np.sign(loading[np.abs(loading).argmax()])
    best, least = None, math.inf
    for z in np.linspace(1e-4, 1, 1000):
        beta = np.stack([project(own, z) for own in kappa])
        beta /= beta.sum(1, keepdims=True)
        apart = np.linalg.norm(beta[:, None] - beta[None], axis=2)
        energy = (1 / apart[np.triu_indices(len(beta), 1)].clip(1e-4) ** 2).sum()
        if energy < least:
            best, least = beta, energy
    return best


def floco(s: Setting, method: Any, ends: Tensor, random: Any, order: Order) -> Result:
    """`ends` `[M, C, d]`: the initial endpoints. `random(purpose)(t, i, epoch, steps)`: uniform
    numbers `[steps, M + 1]`. `order`: of the gathering. FLOCO+ trains a private copy on the same
    batches and points.
    """
    weight, m, is_plus = HEAD[0], len(ends), hasattr(method, "pers_epochs")
    starts = {**s.initial, weight: ends}
    betas, private, have_trained = dict[int, Tensor](), s.each(starts), set[int]()

    def point(numbers: Tensor, i: int) -> Tensor:
        if i not in betas:
            exponential = -(1 - numbers[:m]).log()
            return exponential / exponential.sum()
        u = 2 * numbers[:m] - 1
        return betas[i] + method.rho * numbers[m] * u / u.abs().sum()

    def at(weights: Weights, alpha: Tensor) -> Weights:
        pairs = zip(alpha, weights[weight], strict=True)
        return {**weights, weight: sum(a * end for a, end in pairs)}

    def descend(
        start: Weights, turn: Turn, s: Setting, draw: Callable, epochs: int, anchor=None
    ) -> Weights:
        values = {k: v.clone().requires_grad_() for k, v in start.items()}
        batches = []
        for epoch in range(epochs):
            own = list(plain.minibatches(s, turn, [epoch]))
            numbers = draw(turn.t, turn.i, epoch, len(own))
            batches += [(*batch, row) for batch, row in zip(own, numbers, strict=True)]

        def loss(module: nn.Module, x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:
            model = at(values, point(numbers, turn.i))
            return F.cross_entropy(torch.func.functional_call(module, model, (x,)), y)

        def add_pull(_: nn.Module) -> None:
            for k, p in values.items():
                p.grad += method.lam * (p.detach() - anchor[k])

        pull = add_pull if anchor else None
        plain.fit(s, s.module, batches, loss, [{"params": list(values.values())}], pull)
        return {k: v.detach() for k, v in values.items()}

    def gather(turn: Turn) -> None:
        rows, gathering = [], plain.replace(s, order=order)
        for i in s.everyone:
            end = descend(turn.shared, Turn(turn.t, i, {}), gathering, random("gather"), s.epochs)
            rows.append(end[weight].flatten().double().numpy())
        betas.update(enumerate(torch.from_numpy(centres(np.stack(rows), m)).float()))

    def private_of(turn: Turn) -> Weights:
        is_cold = method.cold_start == "global" and turn.i not in have_trained
        return turn.shared if is_cold else private[turn.i]

    def begin(turn: Turn) -> Weights:
        if turn.t - 1 == method.tau and not betas:
            gather(turn)
        return personal(turn)

    def personal(turn: Turn) -> Weights:
        alpha = betas.get(turn.i, torch.full((m,), 1 / m))
        return at(private_of(turn) if is_plus else turn.shared, alpha)

    def local(_: Any, turn: Turn) -> Weights:
        end = descend(turn.shared, turn, s, random("train"), s.epochs)
        if is_plus:
            old, epochs = private_of(turn), method.pers_epochs
            have_trained.add(turn.i)
            private[turn.i] = descend(old, turn, s, random("train"), epochs, anchor=turn.shared)
        return end

    after = lambda i, end: personal(Turn(0, i, end))  # noqa: E731
    return plain.play(s, local, begin, personal=personal, after=after, shared=starts)


def lda(mean: Tensor, cov: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    d = len(cov)
    sigma = (1 - EPS) * cov + EPS * (torch.trace(cov) / d) * torch.eye(d, dtype=torch.float64)
    weight = torch.linalg.solve(sigma, mean.T).T
    return weight, -0.5 * (mean * weight).sum(1) + prior.log()


def class_prior(y: Tensor) -> Tensor:
    frequency = torch.stack([(y == c).double().mean() for c in range(CLASSES)]) + EPS
    return frequency / frequency.sum()


def covariance(z: Tensor, y: Tensor, mean: Tensor) -> Tensor:
    scatter = sum(torch.outer(row - mean[c], row - mean[c]) for row, c in zip(z, y, strict=True))
    return scatter / max(1, len(z) - 1) + torch.eye(z.shape[1], dtype=torch.float64) + 1e-4


def means(z: Tensor, y: Tensor, otherwise: Tensor, least: int) -> Tensor:
    rows = [z[y == c] for c in range(len(otherwise))]
    pairs = zip(rows, otherwise, strict=True)
    return torch.stack([own.mean(0) if len(own) >= least else other for own, other in pairs])


def objective(
    z: Tensor, y: Tensor, prior: Tensor, mean: Tensor, cov: Tensor, folds: int
) -> Callable[[Tensor], Tensor] | None:
    """The summed held-out cross-entropy as a function of beta, or None without any class of so many
    samples.
    """
    counts = torch.bincount(y, minlength=len(prior))
    z, y = z[counts[y] >= folds], y[counts[y] >= folds]
    if not len(y):
        return None
    fold = torch.stack([(y[:j] == c).sum() % folds for j, c in enumerate(y)])
    parts = []
    for k in range(folds):
        is_training, is_held = fold != k, fold == k
        mu = means(z[is_training], y[is_training], mean, 1)
        own = covariance(z[is_training], y[is_training], mu)
        parts.append((mu, own, z[is_held], y[is_held]))

    def value(b: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for mu, own, x, label in parts:
            mixed = b[0] * mu + (1 - b[0]) * mean, b[1] * own + (1 - b[1]) * cov
            weight, bias = lda(*mixed, prior)
            total = total + F.cross_entropy(x @ weight.T + bias, label, reduction="sum")
        return total

    return value


def fit_statistics(
    z: Tensor, y: Tensor, prior: Tensor, mean: Tensor, cov: Tensor, least: int
) -> tuple[Tensor, Tensor]:
    value, beta = objective(z, y, prior, mean, cov, 2), torch.zeros(2, dtype=torch.float64)
    if value is not None:

        def numbers(b: Any) -> tuple[float, Any]:
            at = torch.tensor(b, requires_grad=True)
            loss = value(at)
            return loss.item(), torch.autograd.grad(loss, at)[0].numpy()

        how = {"jac": True, "bounds": [(0, 1), (0, 1)], "options": {"maxiter": 10}}
        beta = torch.tensor(minimize(numbers, [0.5, 0.5], method="L-BFGS-B", **how).x)
    mu = means(z, y, mean, least)
    own = covariance(z, y, mu)
    return beta[0] * mu + (1 - beta[0]) * mean, beta[1] * own + (1 - beta[1]) * cov


def pfedfda(s: Setting, mean: Tensor) -> Result:
    """Every mixture of covariances is solved anew; statistics travel in single precision."""
    priors = {i: class_prior(client.y) for i, client in enumerate(s.clients)}

    def with_head(weights: Weights, mean: Tensor, cov: Tensor, i: int) -> Weights:
        pair = lda(mean.double(), cov.double(), priors[i])
        return weights | {name: leaf.float() for name, leaf in zip(HEAD, pair, strict=True)}

    def begin(turn: Turn) -> Weights:
        """The global statistics' head, by the client's prior."""
        server = turn.shared
        return with_head(server["body"], server["mean"], server["cov"], turn.i)

    def local(w: Weights, turn: Turn) -> dict[str, Any]:
        server, batches_seen = turn.shared, []
        model = plain.load(s, w).train()
        model.classifier.requires_grad_(False)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = plain.features(model, x)
            batches_seen.append((z.detach().double(), y))
            return F.cross_entropy(model.classifier(z), y)

        plain.fit(s, model, plain.minibatches(s, turn, range(s.epochs)), loss)
        end = {"body": plain.values_of(model)}
        if not batches_seen:
            return end | plain.pick(server, lambda part: part != "body")
        z, y = (torch.cat(rows) for rows in zip(*batches_seen, strict=True))
        global_statistics = server["mean"].double(), server["cov"].double()
        new, cov = fit_statistics(z, y, priors[turn.i], *global_statistics, 1)
        return end | {"mean": new.float(), "cov": cov.float()}

    def personal(turn: Turn) -> dict[str, Tensor]:
        client, server = s.clients[turn.i], turn.shared
        z = plain.features(plain.still(s, server["body"]), client.x).double()
        global_statistics = server["mean"].double(), server["cov"].double()
        found = fit_statistics(z, client.y, priors[turn.i], *global_statistics, 3)
        model = plain.still(s, with_head(server["body"], *found, turn.i))
        return {"logits": model(client.test_x)}

    shared = {"body": s.initial, "mean": mean, "cov": torch.eye(mean.shape[1])}
    after = lambda i, end: end["body"]  # noqa: E731
    return plain.play(s, local, begin, personal=personal, after=after, shared=shared)
