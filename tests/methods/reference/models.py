"""Methods whose clients train the network as it is, or low-rank adapters on it.

Sources: arXiv:1602.05629 (FedAvg), 1812.06127 (FedProx), 1909.06335 (FedAvgM), 2003.00295 (FedAdam,
FedYogi), 2012.04221 (Ditto), 2102.07078 (FedRep), 2106.06042 (FedBABU), 2111.04263 (FedDyn,
Algorithm 1), 1910.06378 (SCAFFOLD), 2103.16257 (MOON, Algorithm 1), ECML PKDD 2021 (FedPHP), IEEE
TPDS 34(2), 2023 (pFedSD), 2006.08848 (pFedMe, Algorithm 1), 2002.07948 (Per-FedAvg, Algorithm 1),
2003.13461 (APFL, Algorithm 1; alpha as in the authors' code), 2212.01197 (FedALA), 2103.04628
(pFedHN), 2111.09360 (kNN-Per), 2001.01523 (LG-FedAvg); over adapters 2410.01463 (FedSA-LoRA),
2403.12313 (FFA-LoRA), 2503.11880 (FedALT), 2601.11219 (SDFLoRA, as far as it could be read),
2402.11505 (FlexLoRA), 2602.13486 (raFLoRA), 2401.06432 (HetLoRA), 2409.05976 (FLoRA), 2410.09432
(FedEx-LoRA).
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference import plain
from tests.methods.reference.plain import HEAD, Order, Result, Setting, Turn, Weights


def centralized(s: Setting, method: Any) -> Result:
    """One client has all samples, and takes the steps of the whole cohort."""
    parts = [vars(client) for client in s.clients]
    everything = plain.Client(**{k: torch.cat([own[k] for own in parts]) for k in parts[0]})
    first = [cohort[:1] for cohort in s.cohorts]
    pooled = plain.replace(s, clients=[everything] * len(s.clients), cohorts=first)

    def local(weights: Weights, turn: Turn) -> Weights:
        steps = 0
        for i in s.cohorts[turn.t - 1]:
            steps += len([*plain.minibatches(s, Turn(turn.t, i, None), range(s.epochs))])
        batches = plain.minibatches(pooled, turn, itertools.count())
        model = plain.load(s, weights).train()
        return plain.values_of(plain.fit(s, model, itertools.islice(batches, steps)))

    return plain.play(pooled, local, personal=lambda turn: turn.shared)


def fedprox(s: Setting, method: Any) -> Result:
    return plain.play(s, lambda w, turn: plain.train(s, w, turn, anchor=w, lam=method.mu))


def fedavgm(s: Setting, method: Any) -> Result:
    """The server takes a step of SGD along the clients' mean change."""
    values = {name: nn.Parameter(value) for name, value in s.initial.items()}
    steps = {"lr": method.lr, "momentum": method.momentum, "nesterov": method.nesterov}
    optimizer = torch.optim.SGD(values.values(), **steps)

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        end = plain.average(s, trained)
        for name, value in values.items():
            value.grad = value.detach() - end[name]
        optimizer.step()
        return {name: value.detach().clone() for name, value in values.items()}

    return plain.play(s, merge=merge)


def fedopt(s: Setting, method: Any) -> Result:
    """FedAdam and FedYogi of Algorithm 2."""
    a, is_adam = method, type(method).__name__ == "FedAdam"
    m = {k: torch.zeros_like(x, dtype=torch.double) for k, x in s.initial.items()}
    v = {k: torch.full_like(x, a.tau**2, dtype=torch.double) for k, x in s.initial.items()}

    def merge(shared: Weights, trained: dict[int, Weights], t: int) -> Weights:
        end, moved = plain.average(s, trained), {}
        for k, x in shared.items():
            delta = end[k].double() - x.double()
            m[k] = a.beta1 * m[k] + (1 - a.beta1) * delta
            direction = v[k] - delta**2 if is_adam else delta**2 * torch.sign(v[k] - delta**2)
            v[k] = v[k] - (1 - a.beta2) * direction
            moved[k] = (x.double() + a.lr * m[k] / (v[k] ** 0.5 + a.tau)).float()
        return moved

    return plain.play(s, merge=merge)


def fedrep(s: Setting, head_epochs: int, body_epochs: int) -> Result:
    def local(w: Weights, turn: Turn) -> Weights:
        w = plain.train(s, w, turn, head_epochs, is_moving=lambda name: name in HEAD, is_still=True)
        body = {"is_moving": lambda name: name not in HEAD, "first": head_epochs}
        return plain.train(s, w, turn, body_epochs, **body)

    return plain.split(s, lambda name: name in HEAD, local)


def ditto(s: Setting, method: Any) -> Result:
    own = s.each(s.initial)

    def local(_: Weights, turn: Turn) -> Weights:
        i = turn.i
        epochs = method.personal_epochs
        own[i] = plain.train(s, own[i], turn, epochs, anchor=turn.shared, lam=method.lam)
        return plain.train(s, turn.shared, turn)

    return plain.play(s, local, begin=lambda turn: own[turn.i], after=lambda i, _: own[i])


def feddyn(s: Setting, method: Any) -> Result:
    """By clients' g_i = -alpha lam_i and the server's h. `personal` is the model `judge` names."""
    alpha = method.alpha
    zeros = {k: torch.zeros_like(v) for k, v in s.initial.items()}
    h, g, last_models, models = dict(zeros), s.each(zeros), s.each(s.initial), {}

    def local(w: Weights, turn: Turn) -> Weights:
        i = turn.i

        def add_terms(model: nn.Module) -> None:
            for name, p in model.named_parameters():
                p.grad += alpha * (p.detach() - w[name]) - g[i][name]

        end = plain.train(s, w, turn, after_gradient=add_terms)
        g[i] = {k: g[i][k] - alpha * (end[k] - w[k]) for k in w}
        return end

    def merge(shared: Weights, trained: dict[int, Weights], t: int) -> Weights:
        ends = list(trained.values())
        for k in shared:
            h[k] = h[k] - alpha / len(s.clients) * sum(end[k] - shared[k] for end in ends)
        models["cohort"], models["all"] = plain.mean(ends), plain.mean(last_models.values())
        models["cloud"] = {k: models["cohort"][k] - h[k] / alpha for k in shared}
        return models["cloud"]

    told = {"extras": lambda _: {"g": plain.stack(g.values())}, "own": last_models}
    return plain.play(s, local, merge=merge, personal=lambda turn: models[method.judge], **told)


def scaffold(s: Setting, method: Any) -> Result:
    """Option II, whose formula holds without momentum and weight decay."""
    zeros = {k: torch.zeros_like(v) for k, v in s.initial.items()}
    control, own, changes = dict(zeros), s.each(zeros), []

    def local(shared: Weights, turn: Turn) -> Weights:
        def correct(model: nn.Module) -> None:
            for k, p in model.named_parameters():
                p.grad += control[k] - own[turn.i][k]

        end = plain.train(s, shared, turn, after_gradient=correct)
        steps = len(list(plain.minibatches(s, turn, range(s.epochs))))
        if steps:
            gradient = {k: (shared[k] - end[k]) / (steps * s.lr) for k in end}
            changes.append({k: gradient[k] - control[k] for k in end})
            own[turn.i] = {k: own[turn.i][k] + changes[-1][k] for k in end}
        return end

    def merge(shared: Weights, trained: dict[int, Weights], t: int) -> Weights:
        share, ends = method.server_lr / len(trained), trained.values()
        for k in shared:
            control[k] = control[k] + sum(change[k] for change in changes) / len(s.clients)
        changes.clear()
        return {k: v + share * sum(end[k] - v for end in ends) for k, v in shared.items()}

    return plain.play(s, local, merge=merge)


def moon(s: Setting, method: Any) -> Result:
    """No term before a client has a previous model."""
    previous: dict[int, Weights] = {}

    def local(shared: Weights, turn: Turn) -> Weights:
        others = [plain.still(s, w) for w in (shared, previous.get(turn.i)) if w]

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = plain.features(model, x)
            value = F.cross_entropy(model.classifier(z), y)
            if len(others) == 1:
                return value
            both = [plain.features(other, x) for other in others]
            cosines = [(z * own).sum(1) / z.norm(dim=1) / own.norm(dim=1) for own in both]
            first = torch.zeros(len(y), dtype=torch.long)
            apart = F.cross_entropy(torch.stack(cosines, 1) / method.tau, first)
            return value + method.mu * apart

        return plain.train(s, shared, turn, loss=loss)

    rows = lambda _: {"last": plain.stack([previous.get(i, s.initial) for i in s.everyone])}  # noqa: E731
    return plain.play(s, local, extras=rows, own=previous)


def squared_mmd(f: Tensor, g: Tensor) -> Tensor:
    """Five Gaussian kernels around the mean squared distance, pair by pair."""
    both = torch.cat([f, g]).double()  # small differences of kernels near 1
    gaps = torch.stack([((row - both) ** 2).sum(1) for row in both])
    n, own = len(both), len(f)
    width = float(gaps.detach().sum()) / (n * n - n) + 1e-8
    kernel = sum(torch.exp(-gaps / (width * factor)) for factor in (0.25, 0.5, 1, 2, 4))
    same, other = kernel[:own, :own] + kernel[own:, own:], kernel[:own, own:] + kernel[own:, :own]
    return (same - other).mean().float()


def fedphp(s: Setting, method: Any, planned: int) -> Result:
    """Transfer and momentum as in the authors' code; `planned`: the rounds of the whole run."""
    lam = method.lam
    inherited, count = s.each(s.initial), s.each(0)

    def local(_: Weights, turn: Turn) -> Weights:
        i, teacher = turn.i, plain.still(s, inherited[turn.i])

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            f, g = plain.features(model, x), plain.features(teacher, x)
            logits, teacher_logits = model.classifier(f), teacher.classifier(g)
            distilled = F.cross_entropy(logits, F.softmax(teacher_logits / 4, 1))
            extra = squared_mmd(f, g) if method.transfer == "mmd" else distilled
            return (1 - lam) * F.cross_entropy(logits, y) + lam * extra

        end = plain.train(s, turn.shared, turn, loss=loss)
        expected = max(int(len(s.cohorts[turn.t - 1]) / len(s.clients) * planned), 1)
        mu = method.momentum * min(count[i] / expected, 1)
        for k, old in inherited[i].items():
            inherited[i][k] = (mu * old + (1 - mu) * end[k]).to(end[k].dtype)
        count[i] += 1
        return end

    def begin(turn: Turn) -> Weights:
        return dict(inherited[turn.i]) if count[turn.i] else turn.shared

    return plain.play(s, local, begin, after=lambda i, _: inherited[i])


def pfedsd(s: Setting, method: Any) -> Result:
    """Statistics are the client's."""
    own, teachers, tau = s.each(s.initial), {}, method.tau

    def local(w: Weights, turn: Turn) -> Weights:
        teacher = plain.load(s, teachers.get(turn.i, w)).train(method.teacher == "train")

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            logits = model(x)
            if turn.i not in teachers:
                return F.cross_entropy(logits, y)
            with torch.no_grad():
                target = F.softmax(teacher(x) / tau, 1)
            apart = F.kl_div(F.log_softmax(logits / tau, 1), target, reduction="batchmean")
            return F.cross_entropy(logits, y) + method.lam * tau**2 * apart

        teachers[turn.i] = plain.train(s, w, turn, loss=loss)
        return teachers[turn.i]

    def begin(turn: Turn) -> Weights:
        return own[turn.i] | plain.pick(turn.shared, lambda name: name in s.names)

    return plain.play(s, local, begin, own=own)


def uniform_parameters(s: Setting, trained: dict[int, Weights]) -> Weights:
    """Average parameters alike, statistics by samples."""
    uniform_mean = plain.mean(trained.values())
    return plain.average(s, trained) | {k: uniform_mean[k] for k in s.names}


def pfedme(s: Setting, method: Any) -> Result:
    """`personal` holds th's parameters and the server's statistics; explicit updates."""
    m, th = method, {}

    def local(shared: Weights, turn: Turn) -> Weights:
        model = plain.load(s, shared).train()
        w = {k: p.detach().clone() for k, p in model.named_parameters()}
        for x, y in plain.minibatches(s, turn, range(s.epochs)):
            for _ in range(m.inner_steps):
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
                with torch.no_grad():
                    for k, p in model.named_parameters():
                        p -= m.inner_lr * (p.grad + m.lam * (p - w[k]) + m.mu * p)
            for k, p in model.named_parameters():
                w[k] = w[k] - m.outer_lr * m.lam * (w[k] - p.detach())
        th[turn.i] = plain.values_of(model)
        return {**th[turn.i], **w}

    def merge(shared: Weights, trained: dict[int, Weights], t: int) -> Weights:
        is_uniform = m.average == "uniform"
        new = uniform_parameters(s, trained) if is_uniform else plain.average(s, trained)
        return new | {k: (1 - m.beta) * shared[k] + m.beta * new[k] for k in s.names}

    def personal(turn: Turn) -> Weights:
        return turn.shared | plain.pick(th.get(turn.i, {}), lambda name: name in s.names)

    return plain.play(s, local, merge=merge, personal=personal, after=lambda i, _: th[i])


def gradient_at(model: nn.Module, weights: Weights, x: Tensor, y: Tensor) -> Weights:
    """At other weights; the module keeps its own, and its statistics move."""
    values = {k: w.detach().clone().requires_grad_() for k, w in weights.items()}
    loss = F.cross_entropy(torch.func.functional_call(model, values, (x,)), y)
    return dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))


def unmoved(model: nn.Module, weights: Weights, x: Tensor, y: Tensor) -> Weights:
    """The same on a copy, whose statistics are thrown away."""
    return gradient_at(plain.copy_module(model, model.state_dict()), weights, x, y)


def parameters_of(model: nn.Module) -> Weights:
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def per_fedavg(s: Setting, method: Any, adapt: Order) -> Result:
    """`adapt`: the order of the minibatches that a client is adapted on before it is evaluated."""
    alpha, delta, is_hf = method.inner_lr, method.delta, method.version == "hf"
    batches_per_step = 3 if is_hf else 2

    def local(shared: Weights, turn: Turn) -> Weights:
        model = plain.load(s, shared).train()
        for epoch in range(s.epochs):
            batches = list(plain.minibatches(s, turn, [epoch]))
            while len(batches) >= batches_per_step:
                now, batches = batches[:batches_per_step], batches[batches_per_step:]
                w = parameters_of(model)
                one = unmoved(model, w, *now[0])
                direction = gradient_at(model, {k: w[k] - alpha * one[k] for k in w}, *now[1])
                if is_hf:
                    up, down = (
                        unmoved(model, {k: w[k] + d * direction[k] for k in w}, *now[2])
                        for d in (delta, -delta)
                    )
                    for k in w:
                        direction[k] = direction[k] - alpha * (up[k] - down[k]) / (2 * delta)
                moved = {k: w[k] - method.outer_lr * direction[k] for k in w}
                model.load_state_dict(moved, strict=False)
        return plain.values_of(model)

    def personal(turn: Turn) -> Weights:
        """Plain steps, with the statistics of the model that they begin with."""
        model, steps = plain.load(s, turn.shared).train(), method.adapt_steps
        weights = parameters_of(model)
        batches = plain.minibatches(plain.replace(s, order=adapt), turn, range(steps))
        for batch in itertools.islice(batches, steps):
            g = unmoved(model, weights, *batch)
            weights = {k: w - alpha * g[k] for k, w in weights.items()}
        return {**turn.shared, **weights}

    merge = lambda _, trained, t: uniform_parameters(s, trained)  # noqa: E731
    return plain.play(s, local, merge=merge, personal=personal)


class Pair(nn.Module):
    """The shared model and a private one."""

    def __init__(self, s: Setting, shared: Weights, own: Weights):
        super().__init__()
        self.w, self.v = plain.load(s, shared), plain.load(s, own)

    def mix(self, alpha: float, mixing: str, x: Tensor) -> Tensor:
        """Logits; the shared model is given."""
        if mixing == "param":
            pairs = zip(self.v.named_parameters(), self.w.parameters(), strict=True)
            mixed = {k: alpha * a + (1 - alpha) * b.detach() for (k, a), b in pairs}
            return torch.func.functional_call(self.v, mixed, (x,))
        shared = plain.copy_module(self.w, self.w.state_dict())
        return alpha * self.v(x) + (1 - alpha) * shared(x).detach()


def apfl(s: Setting, method: Any) -> Result:
    m, mixing = method, method.mixing
    own, alphas = s.each(s.initial), s.each(m.alpha)
    have_moved: set[int] = set()

    def slope(pair: Pair, now: float, x: Tensor, y: Tensor) -> float:
        """Of the mixture's loss in alpha, as the specification takes it, on copies."""
        w, v = (plain.copy_module(own, own.state_dict()) for own in (pair.w, pair.v))
        both = list(zip(v.parameters(), w.parameters(), strict=True))
        if mixing == "param":
            with torch.no_grad():
                apart = [a - b for a, b in both]
                for a, b in both:
                    a.copy_(now * a + (1 - now) * b)
            F.cross_entropy(v(x), y).backward()
            grads = [a.grad for a, _ in both]
        else:
            F.cross_entropy(now * v(x) + (1 - now) * w(x), y).backward()
            apart = [a - b for a, b in both]
            grads = [now * a.grad + (1 - now) * b.grad for a, b in both]
        pairs = zip(apart, grads, strict=True)
        return sum(float((d * g).detach().double().sum()) for d, g in pairs)

    def local(_: Any, turn: Turn) -> Weights:
        i, pair = turn.i, Pair(s, turn.shared, own[turn.i]).train()
        now = new = alphas[i]
        batches = list(plain.minibatches(s, turn, range(s.epochs)))
        if batches:
            g = slope(pair, now, *batches[0]) + m.alpha_decay * now
            new = min(1.0, max(0.0, now - m.alpha_lr * g))
            have_moved.add(i)

        def loss(pair: Pair, x: Tensor, y: Tensor, weight: float) -> Tensor:
            mixed = F.cross_entropy(pair.mix(weight, mixing, x), y)
            return mixed + F.cross_entropy(pair.w(x), y)

        plain.fit(s, pair, [(*batch, new if k else now) for k, batch in enumerate(batches)], loss)
        own[i], alphas[i] = plain.values_of(pair.v), new
        return plain.values_of(pair.w)

    def predict(parts_of: tuple[Weights, Weights, float], i: int) -> Tensor:
        pair = Pair(s, *parts_of[:2]).eval()
        with torch.no_grad():
            return pair.mix(parts_of[2], mixing, s.clients[i].test_x)

    def parts_of(shared: Weights, i: int) -> tuple[Weights, Weights, float]:
        is_cold = m.cold_start == "global" and i not in have_moved
        return shared, dict(own[i]), 0.0 if is_cold else alphas[i]

    def extras(_: Any) -> dict[str, Any]:
        return {"alpha": torch.tensor([*alphas.values()]), "v": plain.stack(own.values())}

    return plain.play(s, local, parts=parts_of, logits=predict, extras=extras)


def fedala(s: Setting, layers: tuple[str, ...], method: Any, draw: Any, adapt: Any) -> Result:
    """`layers`: prefixes of the top. `draw(t, i)`, `adapt(t, i)`: orders of the samples, in round t
    and after it.
    """
    top = [k for k in s.initial if k.startswith(layers)]
    own: dict[int, Weights] = {}
    weights = s.each({k: torch.ones_like(s.initial[k]) for k in top})
    has_settled = s.each(False)

    def merged(shared: Weights, i: int, by: Weights) -> Weights:
        return {**shared, **{k: own[i][k] + (shared[k] - own[i][k]) * by[k] for k in top}}

    def learn(shared: Weights, i: int, order: Tensor) -> tuple[Weights, bool]:
        """Return the weights after learning, and whether there was anything to learn from."""
        client, new, losses = s.clients[i], dict(weights[i]), []
        rows = [
            b for b in order[: int(method.share * len(order))].split(s.batch_size) if len(b) > 1
        ]
        while rows and len(losses) < 100:
            for batch in rows:
                model = plain.load(s, merged(shared, i, new)).eval()
                loss = F.cross_entropy(model(client.x[batch]), client.y[batch])
                loss.backward()
                for k, p in model.named_parameters():
                    if k in top:
                        slope = p.grad * (shared[k] - own[i][k])
                        new[k] = torch.clamp(new[k] - method.eta * slope, 0, 1)
            losses.append(loss.item())
            is_settled = len(losses) > 10 and statistics.pstdev(losses[-10:]) < 0.1
            if has_settled[i] or is_settled:
                break
        return new, bool(rows)

    def begin(turn: Turn) -> Weights:
        if turn.i not in own:
            return turn.shared
        weights[turn.i], done = learn(turn.shared, turn.i, draw(turn.t, turn.i))
        has_settled[turn.i] |= done
        return merged(turn.shared, turn.i, weights[turn.i])

    def personal(turn: Turn) -> Weights:
        if turn.i not in own:
            return turn.shared
        return merged(turn.shared, turn.i, learn(turn.shared, turn.i, adapt(turn.t, turn.i))[0])

    return plain.play(s, None, begin, personal=personal, own=own)


def pfedhn(s: Setting, learned: dict[str, Any], method: Any) -> Result:
    """`learned`: initial embeddings `v`, an `mlp`, and a linear map for each generated tensor.
    Clients come one by one if the method says so.
    """
    m, learned = method, plain.trainable(learned)
    table, everything = learned["v"], plain.leaves_of(learned)
    phi = [p for p in everything if p is not table]
    groups = [{"params": phi}, {"params": [table], "lr": m.embedding_lr or m.lr}]
    values = {"momentum": m.momentum, "weight_decay": m.weight_decay}
    optimizer = torch.optim.SGD(groups, lr=m.lr, **values)
    heads = s.each(plain.pick(s.initial, lambda name: name in HEAD and m.variant == "pc"))

    def network(i: int) -> Weights:
        first, *deeper = learned["mlp"].values()
        z = F.linear(table[i], **first)
        for layer in deeper:
            z = F.linear(z.relu(), **layer)
        weights = learned["weight"].items()
        return {
            name: (w @ z).view_as(learned["bias"][name]) + learned["bias"][name]
            for name, w in weights
        }

    def model(i: int) -> Weights:
        return {**plain.detached(network(i)), **heads[i]}

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        optimizer.zero_grad()
        for i, end in trained.items():
            made = network(i)
            slopes = [(made[k].detach() - end[k]) / len(trained) for k in made]
            torch.autograd.backward([made[k] for k in made], slopes)
            heads[i] = plain.pick(end, lambda name, i=i: name in heads[i])
        torch.nn.utils.clip_grad_norm_(everything, m.clip or 1e9)
        others = [i for i in s.everyone if i not in trained]
        kept, speed = table.detach()[others].clone(), optimizer.state[table].get("momentum_buffer")
        kept_speed = torch.zeros_like(kept) if speed is None else speed[others].clone()
        optimizer.step()
        if m.rows != "all":
            with torch.no_grad():
                table[others] = kept
            if m.momentum:
                optimizer.state[table]["momentum_buffer"][others] = kept_speed
        return {}

    return plain.play(
        s,
        begin=lambda turn: model(turn.i),
        merge=merge,
        extras=lambda _: {"learned": plain.detached(learned)},
        groups=lambda t, cohort: [[i] for i in cohort] if m.order == "sequential" else [cohort],
    )


def voted(
    z: Tensor, keys: Tensor, labels: Tensor, k: int, scale: float, distance: str
) -> list[float]:
    """Sort distances and count votes one by one."""
    apart = []
    for j, key in enumerate(keys):
        square = float(((z - key) ** 2).sum())
        far = square / (scale * len(z)) if distance == "squared" else square**0.5 / scale
        apart.append((far, j))
    near = sorted(apart)[:k]
    votes = torch.tensor([-far for far, _ in near], dtype=torch.double).softmax(0)
    share = [0.0] * 5
    for vote, (_, j) in zip(votes.tolist(), near, strict=True):
        share[int(labels[j])] += vote
    return share


def knn_per(s: Setting, method: Any) -> Result:
    """In float64."""
    m, chosen = method, s.each(0.0)

    def parts_of(weights: Weights, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each image p_knn, and the model's probabilities (or logits)."""
        model, client = plain.still(s, weights), s.clients[i]
        keys, z = plain.features(model, client.x).double(), plain.features(model, x).double()
        out = model(x).double()
        votes = [voted(row, keys, client.y, m.k, m.scale, m.distance) for row in z]
        votes = torch.tensor(votes, dtype=torch.double).view(-1, 5)
        return votes, out if m.mix == "logits" else out.softmax(1)

    def tune(votes: Tensor, own: Tensor, y: Tensor) -> float:
        """Find the lam of most hits, then of least cross-entropy, then the least."""
        best = None
        for step in range(11):
            scores = step / 10 * votes + (1 - step / 10) * own
            loss = float(-scores[range(len(y)), y].clamp(min=1e-38).log().sum())
            right = plain.count_hits(scores, y)
            if best is None or (right, -loss) > (best[0], -best[1] + 1e-9):
                best = right, loss, step / 10
        return best[2]

    def judge(weights: Weights, i: int) -> int:
        client = s.clients[i]
        is_given = m.lam is not None
        lam = m.lam if is_given else tune(*parts_of(weights, i, client.held_x), client.held_y)
        votes, own = parts_of(weights, i, client.test_x)
        chosen[i] = lam
        return plain.count_hits(lam * votes + (1 - lam) * own, client.test_y)

    result = plain.play(s, judge=judge)
    result.counts = [len(set(chosen.values()))]
    return result


# Low-rank adapters, on layers whose matrices are written out


class Layer(nn.Module):
    """W x + b and the additions, of columns of `x`; a convolution (`side`) unfolds its images into
    such.
    """

    def __init__(self, values: Weights, scale: float, side: int = 0):
        super().__init__()
        self.scale, self.side = scale, side
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(x, self.side) if self.side else x.unsqueeze(-1)
        y = self.weight.flatten(1) @ columns + self.bias[:, None]
        names = [name for name, _ in self.named_parameters() if name.startswith("lora_A")]
        products = [
            self._matrix(f"lora_B{name[6:]}") @ (self._matrix(name) @ columns) for name in names
        ]
        if len(names) > 1:
            votes = (self._matrix("lora_mixer") @ columns).exp()
            shares = [
                votes[:, [place]] / votes.sum(1, keepdim=True) for place in range(len(products))
            ]
            products = [own * share for own, share in zip(products, shares, strict=True)]
        if hasattr(self, "lora_residue"):
            products.append(self._matrix("lora_residue") @ columns)
        y = y + self.scale * sum(products)
        height = x.shape[-1] - self.side + 1
        return y.unflatten(-1, (height, height)) if self.side else y.squeeze(-1)

    def _matrix(self, name: str) -> Tensor:
        value = getattr(self, name)
        return value.flatten(1) if self.side else value[0]


class Adapted(nn.Module):
    """The package's Tiny network with low-rank additions to all but the head."""

    def __init__(self, values: Weights, scale: float):
        super().__init__()

        def of(layer: str) -> Weights:
            return {k.partition(".")[2]: v for k, v in values.items() if k.startswith(f"{layer}.")}

        self.conv, self.fc = Layer(of("conv"), scale, side=3), Layer(of("fc"), scale)
        self.classifier = nn.Linear(12, 5)
        self.classifier.load_state_dict(of("classifier"))

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(torch.tanh(self.conv(x)), 2)
        return self.classifier(torch.tanh(self.fc(x.flatten(1))))


def is_trained(name: str) -> bool:
    return "lora_" in name or name.startswith("classifier")


def by_name(
    s: Setting,
    is_own: Callable[[str], bool] = lambda name: False,
    is_moving: Callable[[str], bool] = is_trained,
) -> Result:
    """FedSA-LoRA by what is a client's own; FFA-LoRA by what moves."""
    return plain.split(s, is_own, lambda w, turn: plain.train(s, w, turn, is_moving=is_moving))


def fedalt(s: Setting, drawn: Callable[[int, int], Weights] | None = None) -> Result:
    """drawn: the A's with which a client begins in the round of its first participation, by round
    and client.
    """
    own, uploads = s.each(s.initial), dict[int, Weights]()

    def mixture(turn: Turn) -> Weights:
        others = [upload for j, upload in uploads.items() if j != turn.i]
        rest_of_world = {}
        for name in own[turn.i]:
            if name.endswith(("lora_A1", "lora_B1")):
                sent = [upload[name[:-1]] for upload in others]
                rest_of_world[name] = sum(sent) / len(sent) if sent else 0 * own[turn.i][name]
        return own[turn.i] | rest_of_world

    def begin(turn: Turn) -> Weights:
        if drawn and turn.i not in uploads:
            own[turn.i] = own[turn.i] | drawn(turn.t, turn.i)
        return mixture(turn)

    def local(w: Weights, turn: Turn) -> Weights:
        is_moving = lambda name: is_trained(name) and not name.endswith("1")  # noqa: E731
        own[turn.i] = plain.train(s, w, turn, is_moving=is_moving)
        return own[turn.i]

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        for i, end in trained.items():
            uploads[i] = plain.pick(end, lambda name: name.endswith(("lora_A", "lora_B")))
        return {}

    return plain.play(s, local, begin, merge, personal=mixture)


def matrix(value: Tensor, layer: str) -> np.ndarray:
    return (value.flatten(1) if layer == "conv" else value[0]).double().numpy()


AXES = {"conv.lora_A": 0, "conv.lora_B": 1, "fc.lora_A": 1, "fc.lora_B": 2}
"""Along which the rank runs."""


def sdflora(s: Setting) -> Result:
    """Of the two ranks the first, a row of A and a column of B, is shared; heads are clients'."""
    own: dict[int, Weights] = {}

    def cut(weights: Weights, first: int, length: int) -> Weights:
        return {k: weights[k].narrow(axis, first, length) for k, axis in AXES.items()}

    def keep(i: int, weights: Weights) -> None:
        head = plain.pick(weights, lambda name: name.startswith("classifier"))
        own[i] = cut(weights, 1, 1) | head

    def begin(turn: Turn) -> Weights:
        pairs = {k: (turn.shared[k], own[turn.i][k]) for k in AXES}
        both = {k: torch.cat(pair, AXES[k]) for k, pair in pairs.items()}
        return turn.shared | own[turn.i] | both

    def local(w: Weights, turn: Turn) -> Weights:
        end = plain.train(s, w, turn, is_moving=is_trained)
        keep(turn.i, end)
        return end

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        sent = {i: end | cut(end, 0, 1) for i, end in trained.items()}
        new, total = plain.average(s, sent), sum(len(s.clients[i].y) for i in trained)
        for layer in ("conv", "fc"):
            a, b, product = f"{layer}.lora_A", f"{layer}.lora_B", 0.0
            for i, w in sent.items():
                share = len(s.clients[i].y) / total
                product = product + share * matrix(w[b], layer) @ matrix(w[a], layer)
            u, values, v = np.linalg.svd(product)
            sign = np.sign(v[0][np.abs(v[0]).argmax()])
            new[a] = torch.from_numpy(sign * v[0]).float().reshape(new[a].shape)
            new[b] = torch.from_numpy(sign * u[:, 0] * values[0]).float().reshape(new[b].shape)
        return new

    for i in s.everyone:
        keep(i, s.initial)
    shared = s.initial | cut(s.initial, 0, 1)
    return plain.play(s, local, begin, merge, after=lambda i, end: end, shared=shared)


# Ranks by client: whoever has a rank trains a network of that rank


LAYERS = ("conv", "fc")
Merge = Callable[[Weights, dict[int, Weights], dict[int, float]], dict[str, Any]]


def cut(weights: Weights, rank: int) -> Weights:
    return weights | {name: weights[name].narrow(axis, 0, rank) for name, axis in AXES.items()}


def padded(weights: Weights, like: Weights) -> Weights:
    """With zeros where the client has no rank."""
    new = dict(weights)
    for name, axis in AXES.items():
        new[name] = torch.zeros_like(like[name])
        new[name].narrow(axis, 0, weights[name].shape[axis]).copy_(weights[name])
    return new


def product(weights: Weights, layer: str) -> np.ndarray:
    a, b = (matrix(weights[f"{layer}.lora_{factor}"], layer) for factor in "AB")
    return b @ a


def with_ranks(
    s: Setting,
    ranks: Sequence[int],
    merge: Merge,
    receive: Callable[[Turn], Weights] | None = None,
    draw: Callable[[Turn, Weights], Weights] = lambda turn, weights: weights,
    local: Callable[[Weights, Turn], Weights] | None = None,
    extras: Callable[[Any], dict[str, Any]] | None = None,
) -> Result:
    """merge: of the old weights, the trained ones and shares, what becomes of the adapted layers:
    matrices of factors or of residues by name. receive: the whole weights that a client begins
    with, before they are cut.
    """

    def held(turn: Turn) -> Weights:
        return cut(receive(turn) if receive else turn.shared, ranks[turn.i])

    def train(w: Weights, turn: Turn) -> Weights:
        is_moving = lambda name: is_trained(name) and "residue" not in name  # noqa: E731
        return plain.train(s, w, turn, is_moving=is_moving)

    def merge_all(old: Weights, trained: dict[int, Weights], t: int) -> Weights:
        total = sum(len(s.clients[i].y) for i in trained)
        shares = {i: len(s.clients[i].y) / total for i in trained}
        heads = {
            i: plain.pick(w, lambda name: name.startswith("classifier")) for i, w in trained.items()
        }
        new = old | plain.average(s, heads)
        for name, value in merge(old, trained, shares).items():
            new[name] = torch.as_tensor(value).float().reshape(old[name].shape)
        return new

    return plain.play(
        s,
        local or train,
        lambda turn: cut(draw(turn, held(turn)), ranks[turn.i]),
        merge_all,
        extras=extras,
        personal=lambda turn: padded(held(turn), s.initial),
    )


def decompose(products: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    new = {}
    for layer, dense in products.items():
        u, values, v = np.linalg.svd(dense)
        for place in range(rank):
            sign = np.sign(v[place][np.abs(v[place]).argmax()])
            u[:, place] *= sign * values[place]
            v[place] *= sign
        new |= {f"{layer}.lora_A": v[:rank], f"{layer}.lora_B": u[:, :rank].copy()}
    return new


def mean_products(trained: dict[int, Weights], shares: dict[int, float]) -> dict[str, np.ndarray]:
    return {
        layer: sum(shares[i] * product(w, layer) for i, w in trained.items()) for layer in LAYERS
    }


def flexlora(s: Setting, ranks: Sequence[int]) -> Result:
    return with_ranks(
        s, ranks, lambda old, trained, shares: decompose(mean_products(trained, shares), 2)
    )


def raflora(s: Setting, ranks: Sequence[int]) -> Result:
    def merge(old: Weights, trained: dict[int, Weights], shares: dict[int, float]) -> Any:
        products = dict.fromkeys(LAYERS, 0.0)
        for layer in LAYERS:
            for place in range(2):
                able = [i for i in trained if ranks[i] > place]
                for i in able:
                    a, b = (matrix(trained[i][f"{layer}.lora_{one}"], layer) for one in "AB")
                    share = shares[i] / sum(shares[j] for j in able)
                    products[layer] = products[layer] + share * np.outer(b[:, place], a[place])
        return decompose(products, 2)

    return with_ranks(s, ranks, merge)


def hetlora(s: Setting, ranks: Sequence[int], m: Any) -> Result:
    """With gamma below 1, ranks shrink from 2 to 1: to the half."""
    left, shrunk = [*ranks], [0]

    def tail(weights: Any) -> Any:
        """|A| |B| of the second place, which some have."""
        parts = [[weights[f"{layer}.lora_{one}"] for one in "AB"] for layer in LAYERS]
        own = [
            [a[1:], b[:, 1:]] if layer == "conv" else [a[:, 1:], b[..., 1:]]
            for layer, (a, b) in zip(LAYERS, parts, strict=True)
        ]
        return sum(a.norm() * b.norm() for a, b in own)

    def pulled(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = plain.cross_entropy(model, x, y)
        return loss + m.lam * tail(dict(model.named_parameters())) if m.gamma < 1 else loss

    def train(w: Weights, turn: Turn) -> Weights:
        is_moving = lambda name: is_trained(name) and "residue" not in name  # noqa: E731
        end = plain.train(s, w, turn, is_moving=is_moving, loss=pulled)
        if m.gamma < 1 and tail(end) < tail(w):
            left[turn.i] = 1
            shrunk[0] += 1
        return end

    def merge(old: Weights, trained: dict[int, Weights], shares: dict[int, float]) -> Any:
        new = {}
        trained = {i: cut(w, left[i]) for i, w in trained.items()}
        for layer in LAYERS:
            norms = {i: np.linalg.norm(product(w, layer)) for i, w in trained.items()}
            wide = {i: padded(w, old) for i, w in trained.items()}
            for name in (f"{layer}.lora_A", f"{layer}.lora_B"):
                rows = [norms[i] * wide[i][name].double() for i in trained]
                new[name] = sum(rows) / sum(norms.values())
        return new

    tell_ranks = lambda shared: {"left": torch.tensor(left)}  # noqa: E731
    result = with_ranks(s, left, merge, local=train, extras=tell_ranks)
    result.counts = shrunk if m.gamma < 1 else []
    return result


def additions(weights: Weights, layer: str) -> np.ndarray:
    """All that a client's layer adds to what is frozen."""
    return matrix(weights[f"{layer}.lora_residue"], layer) + product(weights, layer)


def flora(s: Setting, ranks: Sequence[int], drawn: Callable[[int, int], Weights]) -> Result:
    def merge(old: Weights, trained: dict[int, Weights], shares: dict[int, float]) -> Any:
        return {
            f"{layer}.lora_residue": sum(
                shares[i] * additions(w, layer) for i, w in trained.items()
            )
            for layer in LAYERS
        }

    return with_ranks(s, ranks, merge, draw=lambda turn, weights: weights | drawn(turn.t, turn.i))


def fedex_lora(s: Setting, ranks: Sequence[int]) -> Result:
    """What of the server's product a client has no rank for is in its residue."""

    def receive(turn: Turn) -> Weights:
        new = dict(turn.shared)
        for layer in LAYERS:
            name = f"{layer}.lora_residue"
            rest = additions(turn.shared, layer) - product(cut(turn.shared, ranks[turn.i]), layer)
            new[name] = torch.as_tensor(rest).float().reshape(new[name].shape)
        return new

    def merge(old: Weights, trained: dict[int, Weights], shares: dict[int, float]) -> Any:
        new = {}
        for name, axis in AXES.items():
            missing = {i: old[name].narrow(axis, ranks[i], 2 - ranks[i]) for i in trained}
            whole = [shares[i] * torch.cat((w[name], missing[i]), axis) for i, w in trained.items()]
            new[name] = sum(whole)
        for layer in LAYERS:
            mean = sum(shares[i] * additions(w, layer) for i, w in trained.items())
            new[f"{layer}.lora_residue"] = mean - product(new, layer)
        return new

    return with_ranks(s, ranks, merge, receive)
