"""Methods whose clients train the network as it is.

Sources: arXiv:1602.05629 (FedAvg), 1812.06127 (FedProx), 1909.06335 (FedAvgM), 2003.00295 (FedAdam,
FedYogi), 2012.04221 (Ditto), 2102.07078 (FedRep), 2106.06042 (FedBABU), 2111.04263 (FedDyn,
Algorithm 1), 2103.16257 (MOON, Algorithm 1), ECML PKDD 2021 (FedPHP), IEEE TPDS 34(2), 2023
(pFedSD), 2006.08848 (pFedMe, Algorithm 1), 2002.07948 (Per-FedAvg, Algorithm 1), 2003.13461 (APFL,
Algorithm 1; alpha as in the authors' code), 2212.01197 (FedALA), 2103.04628 (pFedHN).
"""

import copy
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference.plain import (
    HEAD,
    WATCHED,
    Client,
    Result,
    Setting,
    Turn,
    Weights,
    average,
    copy_module,
    count_hits,
    features,
    fit,
    hits,
    load,
    mean,
    minibatches,
    pick,
    play,
    split,
    stack,
    still,
    train,
    values_of,
)


def fedavg(s: Setting, mu: float = 0.0) -> Result:
    """FedProx with mu."""
    return play(s, lambda w, turn: train(s, w, turn, anchor=w if mu else None, lam=mu))


def fedopt(s: Setting, kind: str, lr: float, beta1: float, beta2=0.0, tau=0.0) -> Result:
    """`avgm` (its beta1 is the momentum), `adam` and `yogi` of Algorithm 2."""
    m = {k: torch.zeros_like(x, dtype=torch.double) for k, x in s.initial.items()}
    v = {k: torch.full_like(x, tau**2, dtype=torch.double) for k, x in s.initial.items()}

    def merge(shared: Weights, trained: dict[int, Weights], t: int) -> Weights:
        end, moved = average(s, trained), {}
        for k, x in shared.items():
            delta = end[k].double() - x.double()
            m[k] = beta1 * m[k] + (delta if kind == "avgm" else (1 - beta1) * delta)
            if kind == "adam":
                v[k] = beta2 * v[k] + (1 - beta2) * delta**2
            else:
                v[k] = v[k] - (1 - beta2) * delta**2 * torch.sign(v[k] - delta**2)
            step = m[k] if kind == "avgm" else m[k] / (v[k] ** 0.5 + tau)
            moved[k] = (x.double() + lr * step).float()
        return moved

    return play(s, lambda w, turn: train(s, w, turn), merge=merge)


def fedrep(s: Setting, head_epochs: int, body_epochs: int) -> Result:
    def local(w: Weights, turn: Turn) -> Weights:
        w = train(s, w, turn, head_epochs, is_moving=lambda name: name in HEAD, is_still=True)
        body = {"is_moving": lambda name: name not in HEAD, "first": head_epochs}
        return train(s, w, turn, body_epochs, **body)

    return split(s, lambda name: name in HEAD, local)


def fedbabu(s: Setting) -> Result:
    """Nobody's head ever moves, so nobody's differs."""
    is_body = lambda name: name not in HEAD  # noqa: E731
    return split(s, lambda name: name in HEAD, lambda w, turn: train(s, w, turn, is_moving=is_body))


def ditto(s: Setting, lam: float, personal_epochs: int) -> Result:
    own = s.each(s.initial)

    def local(_: Weights, turn: Turn) -> Weights:
        i = turn.i
        own[i] = train(s, own[i], turn, personal_epochs, anchor=turn.shared, lam=lam)
        return train(s, turn.shared, turn)

    return play(s, local, begin=lambda turn: own[turn.i], after=lambda i, _: own[i])


def feddyn(s: Setting, alpha: float, judge: str = "cloud") -> Result:
    """By clients' g_i = -alpha lam_i and the server's h. `personal` is the model `judge` names."""
    zeros = {k: torch.zeros_like(v) for k, v in s.initial.items()}
    h, g, last_models, models = dict(zeros), s.each(zeros), s.each(s.initial), {}

    def local(w: Weights, turn: Turn) -> Weights:
        i = turn.i

        def add_terms(model: nn.Module) -> None:
            for name, p in model.named_parameters():
                p.grad += alpha * (p.detach() - w[name]) - g[i][name]

        last_models[i] = end = train(s, w, turn, after_gradient=add_terms)
        g[i] = {k: g[i][k] - alpha * (end[k] - w[k]) for k in w}
        return end

    def merge(shared: Weights, trained: dict[int, Weights], t: int) -> Weights:
        ends = list(trained.values())
        for k in shared:
            h[k] = h[k] - alpha / len(s.clients) * sum(end[k] - shared[k] for end in ends)
        models["cohort"] = mean(ends, [1 / len(ends)] * len(ends))
        models["all"] = mean(last_models.values(), [1 / len(last_models)] * len(last_models))
        models["cloud"] = {k: models["cohort"][k] - h[k] / alpha for k in shared}
        return models["cloud"]

    return play(
        s,
        local,
        merge=merge,
        personal=lambda turn: models[judge],
        extras=lambda _: {"g": stack([*g.values()])},
    )


def moon(s: Setting, mu: float, tau: float) -> Result:
    """No term before a client has a previous model."""
    previous: dict[int, Weights] = {}

    def local(shared: Weights, turn: Turn) -> Weights:
        others = [still(s, w) for w in (shared, previous.get(turn.i)) if w]

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = features(model, x)
            value = F.cross_entropy(model.classifier(z), y)
            if len(others) == 1:
                return value
            both = [features(other, x) for other in others]
            cosines = [(z * own).sum(1) / z.norm(dim=1) / own.norm(dim=1) for own in both]
            first = torch.zeros(len(y), dtype=torch.long)
            return value + mu * F.cross_entropy(torch.stack(cosines, 1) / tau, first)

        previous[turn.i] = train(s, shared, turn, loss=loss)
        return previous[turn.i]

    rows = lambda _: {"last": stack([previous.get(i, s.initial) for i in s.everyone])}  # noqa: E731
    return play(s, local, extras=rows)


def squared_mmd(f: Tensor, g: Tensor) -> Tensor:
    """Five Gaussian kernels around the mean squared distance, pair by pair."""
    both = torch.cat([f, g]).double()  # small differences of kernels near 1
    gaps = torch.stack([((row - both) ** 2).sum(1) for row in both])
    n, own = len(both), len(f)
    width = float(gaps.detach().sum()) / (n * n - n) + 1e-8
    kernel = sum(torch.exp(-gaps / (width * factor)) for factor in (0.25, 0.5, 1, 2, 4))
    same, other = kernel[:own, :own] + kernel[own:, own:], kernel[:own, own:] + kernel[own:, :own]
    return (same - other).mean().float()


def fedphp(s: Setting, transfer: str, lam: float, highest: float, planned: int) -> Result:
    """Transfer and momentum as in the authors' code; `planned`: the rounds of the whole run."""
    inherited, count = s.each(s.initial), s.each(0)

    def local(_: Weights, turn: Turn) -> Weights:
        i, teacher = turn.i, still(s, inherited[turn.i])

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            f, g = features(model, x), features(teacher, x)
            logits, teacher_logits = model.classifier(f), teacher.classifier(g)
            distilled = F.cross_entropy(logits, F.softmax(teacher_logits / 4, 1))
            extra = squared_mmd(f, g) if transfer == "mmd" else distilled
            return (1 - lam) * F.cross_entropy(logits, y) + lam * extra

        end = train(s, turn.shared, turn, loss=loss)
        expected = max(int(len(s.cohorts[turn.t - 1]) / len(s.clients) * planned), 1)
        mu = min(highest * count[i] / expected, highest)
        for k, old in inherited[i].items():
            inherited[i][k] = (mu * old + (1 - mu) * end[k]).to(end[k].dtype)
        count[i] += 1
        return end

    def begin(turn: Turn) -> Weights:
        return dict(inherited[turn.i]) if count[turn.i] else turn.shared

    return play(s, local, begin, after=lambda i, _: inherited[i])


def pfedsd(s: Setting, lam: float, tau: float, is_still: bool = True) -> Result:
    """is_still: the teacher is in evaluation mode. Statistics are the client's."""
    own, teachers = s.each(s.initial), {}

    def local(w: Weights, turn: Turn) -> Weights:
        teacher = load(s, teachers.get(turn.i, w)).train(not is_still)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            logits = model(x)
            if turn.i not in teachers:
                return F.cross_entropy(logits, y)
            with torch.no_grad():
                target = F.softmax(teacher(x) / tau, 1)
            apart = F.kl_div(F.log_softmax(logits / tau, 1), target, reduction="batchmean")
            return F.cross_entropy(logits, y) + lam * tau**2 * apart

        own[turn.i] = train(s, w, turn, loss=loss)
        teachers[turn.i] = own[turn.i]
        return own[turn.i]

    return play(
        s,
        local,
        begin=lambda turn: {**own[turn.i], **pick(turn.shared, lambda name: name in s.names)},
        personal=lambda turn: own[turn.i],
    )


def uniform_parameters(s: Setting, trained: dict[int, Weights]) -> Weights:
    """Average parameters alike, statistics by samples."""
    uniform_mean = mean(trained.values(), [1 / len(trained)] * len(trained))
    return average(s, trained) | {k: uniform_mean[k] for k in s.names}


def pfedme(s: Setting, method: Any) -> Result:
    """`personal` holds th's parameters and the server's statistics; explicit updates."""
    m, th = method, {}

    def local(shared: Weights, turn: Turn) -> Weights:
        model = load(s, shared).train()
        w = {k: p.detach().clone() for k, p in model.named_parameters()}
        for x, y in minibatches(s, turn, range(s.epochs)):
            for _ in range(m.inner_steps):
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
                with torch.no_grad():
                    for k, p in model.named_parameters():
                        p -= m.inner_lr * (p.grad + m.lam * (p - w[k]) + m.mu * p)
            for k, p in model.named_parameters():
                w[k] = w[k] - m.outer_lr * m.lam * (w[k] - p.detach())
        th[turn.i] = values_of(model)
        return {**th[turn.i], **w}

    def merge(shared: Weights, trained: dict[int, Weights], t: int) -> Weights:
        is_uniform = m.average == "uniform"
        new = uniform_parameters(s, trained) if is_uniform else average(s, trained)
        return new | {k: (1 - m.beta) * shared[k] + m.beta * new[k] for k in s.names}

    def personal(turn: Turn) -> Weights:
        return turn.shared | pick(th.get(turn.i, {}), lambda name: name in s.names)

    return play(s, local, merge=merge, personal=personal, after=lambda i, _: th[i])


def gradient_at(model: nn.Module, weights: Weights, client: Client, batch: Tensor) -> Weights:
    """At other weights; the module keeps its own, and its statistics move."""
    own = {k: p.detach().clone() for k, p in model.named_parameters()}
    set_parameters(model, weights)
    model.zero_grad()
    F.cross_entropy(model(client.x[batch]), client.y[batch]).backward()
    grads = {k: p.grad.clone() for k, p in model.named_parameters()}
    set_parameters(model, own)
    return grads


def set_parameters(model: nn.Module, weights: Weights) -> None:
    with torch.no_grad():
        for k, p in model.named_parameters():
            p.copy_(weights[k])


def unmoved(model: nn.Module, weights: Weights, client: Client, batch: Tensor) -> Weights:
    """The same on a copy, whose statistics are thrown away."""
    return gradient_at(copy_module(model), weights, client, batch)


def row_batches(s: Setting, turn: Turn, epoch: int) -> list[Tensor]:
    samples = len(s.clients[turn.i].y)
    rows = s.order(turn.t, turn.i, epoch, samples).split(s.batch_size)
    return [own for own in rows if len(own) > 1]


def per_fedavg(s: Setting, is_hf: bool, alpha: float, beta: float, delta: float) -> Result:
    batches_per_step = 3 if is_hf else 2

    def local(shared: Weights, turn: Turn) -> Weights:
        model, client = load(s, shared).train(), s.clients[turn.i]
        for epoch in range(s.epochs):
            rows = row_batches(s, turn, epoch)
            while len(rows) >= batches_per_step:
                now, rows = rows[:batches_per_step], rows[batches_per_step:]
                w = {k: p.detach().clone() for k, p in model.named_parameters()}
                one = unmoved(model, w, client, now[0])
                inner = {k: w[k] - alpha * one[k] for k in w}
                direction = gradient_at(model, inner, client, now[1])
                if is_hf:
                    up, down = (
                        unmoved(model, {k: w[k] + d * direction[k] for k in w}, client, now[2])
                        for d in (delta, -delta)
                    )
                    for k in w:
                        direction[k] = direction[k] - alpha * (up[k] - down[k]) / (2 * delta)
                set_parameters(model, {k: w[k] - beta * direction[k] for k in w})
        return values_of(model)

    return play(s, local, merge=lambda shared, trained, t: uniform_parameters(s, trained))


def adapted(s: Setting, shared: Weights, t: int, i: int, alpha: float, steps: int) -> Weights:
    """Plain steps on the first minibatches of `s.order` (round t), with the statistics of `shared`."""
    model, client = load(s, shared).train(), s.clients[i]
    weights = {k: p.detach().clone() for k, p in model.named_parameters()}
    epoch, rows = 0, []
    for _ in range(steps if len(client.y) > 1 else 0):
        while not rows:
            rows, epoch = row_batches(s, Turn(t, i, shared), epoch), epoch + 1
        g = unmoved(model, weights, client, rows.pop(0))
        weights = {k: w - alpha * g[k] for k, w in weights.items()}
    return {**shared, **weights}


class Pair(nn.Module):
    """The shared model and a private one."""

    def __init__(self, s: Setting, shared: Weights, own: Weights):
        super().__init__()
        self.w, self.v = load(s, shared), load(s, own)

    def mix(self, alpha: float, mixing: str, x: Tensor) -> Tensor:
        """Logits; the shared model is given."""
        if mixing == "param":
            pairs = zip(self.v.named_parameters(), self.w.parameters(), strict=True)
            mixed = {k: alpha * a + (1 - alpha) * b.detach() for (k, a), b in pairs}
            return torch.func.functional_call(self.v, mixed, (x,))
        shared = copy_module(self.w)
        return alpha * self.v(x) + (1 - alpha) * shared(x).detach()


def apfl(s: Setting, alpha: float, mixing: str, lr: float, decay: float) -> Result:
    """`lr` and `decay` are alpha's; lr 0: it is fixed."""
    own, alphas = s.each(s.initial), s.each(alpha)

    def slope(pair: Pair, now: float, x: Tensor, y: Tensor) -> float:
        """Of the mixture's loss in alpha, as the specification takes it, on copies."""
        w, v = copy_module(pair.w), copy_module(pair.v)
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
        return sum(
            float((d * g).detach().double().sum()) for d, g in zip(apart, grads, strict=True)
        )

    def local(_: Any, turn: Turn) -> Weights:
        i, pair = turn.i, Pair(s, turn.shared, own[turn.i]).train()
        now = new = alphas[i]
        batches = list(minibatches(s, turn, range(s.epochs)))
        if lr and batches:
            new = min(1.0, max(0.0, now - lr * (slope(pair, now, *batches[0]) + decay * now)))

        def loss(pair: Pair, x: Tensor, y: Tensor, weight: float) -> Tensor:
            mixed = F.cross_entropy(pair.mix(weight, mixing, x), y)
            return mixed + F.cross_entropy(pair.w(x), y)

        fit(s, pair, [(*batch, new if k else now) for k, batch in enumerate(batches)], loss)
        own[i], alphas[i] = values_of(pair.v), new
        return values_of(pair.w)

    def predict(parts_of: tuple[Weights, Weights, float], i: int) -> Tensor:
        pair = Pair(s, *parts_of[:2]).eval()
        with torch.no_grad():
            return pair.mix(parts_of[2], mixing, s.clients[i].test_x)

    def parts_of(shared: Weights, i: int) -> tuple[Weights, Weights, float]:
        return shared, dict(own[i]), alphas[i]

    return play(
        s,
        local,
        begin=lambda turn: parts_of(turn.shared, turn.i),
        personal=lambda turn: {"logits": predict(parts_of(turn.shared, turn.i), turn.i)},
        after=lambda i, trained: parts_of(trained, i),
        judge=lambda it, i: count_hits(predict(it, i), s.clients[i].test_y),
        extras=lambda _: {
            "alpha": torch.tensor(list(alphas.values())),
            "v": stack([*own.values()]),
        },
    )


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
                model = load(s, merged(shared, i, new)).eval()
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

    def local(w: Weights, turn: Turn) -> Weights:
        own[turn.i] = train(s, w, turn)
        return own[turn.i]

    return play(s, local, begin, personal=personal)


class HyperNetwork(nn.Module):
    """An embedding per client, an MLP, a linear map per generated tensor."""

    def __init__(self, clients: int, embed: int, hidden: int, depth: int, like: Weights):
        super().__init__()
        self.shapes = {name: value.shape for name, value in like.items()}
        self.embedding = nn.Embedding(clients, embed)
        deeper = (nn.Linear(hidden, hidden) for _ in range(depth))
        self.mlp = nn.ModuleList([nn.Linear(embed, hidden), *deeper])
        out = {k.replace(".", "-"): nn.Linear(hidden, v.numel()) for k, v in like.items()}
        self.out = nn.ModuleDict(out)

    def forward(self, i: int) -> Weights:
        z = self.mlp[0](self.embedding(torch.tensor(i)))
        for layer in self.mlp[1:]:
            z = layer(z.relu())
        shapes = self.shapes.items()
        return {name: self.out[name.replace(".", "-")](z).view(shape) for name, shape in shapes}


def pfedhn(s: Setting, network: HyperNetwork, method: Any) -> Result:
    """Whose clients come one by one if the method says so."""
    m, network = method, copy.deepcopy(network)
    table = network.embedding.weight
    phi = [p for p in network.parameters() if p is not table]
    groups = [{"params": phi}, {"params": [table], "lr": m.embedding_lr or m.lr}]
    values = {"momentum": m.momentum, "weight_decay": m.weight_decay}
    optimizer = torch.optim.SGD(groups, lr=m.lr, **values)
    heads = s.each(pick(s.initial, lambda name: name in HEAD and m.variant == "pc"))

    def model(i: int) -> Weights:
        with torch.no_grad():
            return {**{k: v.clone() for k, v in network(i).items()}, **heads[i]}

    def step(differences: dict[int, Weights]) -> None:
        optimizer.zero_grad()
        for i, g in differences.items():
            made = network(i)
            slopes = [g[k] / len(differences) for k in made]
            torch.autograd.backward([made[k] for k in made], slopes)
        torch.nn.utils.clip_grad_norm_(network.parameters(), m.clip or 1e9)
        others = [i for i in s.everyone if i not in differences]
        kept, speed = table.detach()[others].clone(), optimizer.state[table].get("momentum_buffer")
        kept_speed = torch.zeros_like(kept) if speed is None else speed[others].clone()
        optimizer.step()
        if m.rows != "all":
            with torch.no_grad():
                table[others] = kept
            if m.momentum:
                optimizer.state[table]["momentum_buffer"][others] = kept_speed

    result = Result()
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([])
        result.after.append([])
        for members in [[i] for i in cohort] if m.order == "sequential" else [cohort]:
            differences = {}
            for i in members:
                start = model(i)
                end = train(s, start, Turn(t, i, {}))
                result.before[-1].append(hits(s, start, i))
                result.after[-1].append(hits(s, end, i))
                differences[i] = {k: start[k] - end[k] for k in start}
                heads[i] = pick(end, lambda name, i=i: name in heads[i])
            step(differences)
        result.personal.append({i: model(i) for i in WATCHED})
        result.extras.append({"learned": values_of(network)})
    return result


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
    """kNN-Per (arXiv:2111.09360) in float64; `extras` has everybody's lam."""
    m, chosen = method, s.each(0.0)

    def parts_of(weights: Weights, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each image p_knn, and the model's probabilities (or logits)."""
        model, client = still(s, weights), s.clients[i]
        keys, z = features(model, client.x).double(), features(model, x).double()
        out = model(x).double()
        votes = [voted(row, keys, client.y, m.k, m.scale, m.distance) for row in z]
        return torch.tensor(votes, dtype=torch.double).view(
            -1, 5
        ), out if m.mix == "logits" else out.softmax(1)

    def tune(votes: Tensor, own: Tensor, y: Tensor) -> float:
        """Find the lam of most hits, then of least cross-entropy, then the least."""
        best = None
        for step in range(11):
            scores = step / 10 * votes + (1 - step / 10) * own
            loss = float(-scores[range(len(y)), y].clamp(min=1e-38).log().sum())
            right = count_hits(scores, y) if len(y) else 0
            if best is None or (right, -loss) > (best[0], -best[1] + 1e-9):
                best = right, loss, step / 10
        return best[2]

    def judge(weights: Weights, i: int) -> int:
        client = s.clients[i]
        is_given = m.lam is not None
        lam = m.lam if is_given else tune(*parts_of(weights, i, client.held_x), client.held_y)
        votes, own = parts_of(weights, i, client.test_x)
        chosen[i] = lam
        return count_hits(lam * votes + (1 - lam) * own, client.test_y) if len(client.test_y) else 0

    result = play(s, lambda w, turn: train(s, w, turn), judge=judge, is_everyone_judged=True)
    result.counts = [len(set(chosen.values()))]
    return result


def lg_fedavg(s: Setting, *shared: str) -> Result:
    """LG-FedAvg (arXiv:2001.01523). `shared`: prefixes of the parameters that travel."""
    return split(s, lambda name: not name.startswith(shared))
