"""Methods whose clients have clusters, clouds, or each other.

Sources: arXiv:1910.01991 (CFL), 2006.04088 (IFCA, Algorithm 1 with model averaging, and weight
sharing), 2007.03797 (FedAMP, HeurFedAMP), 2012.08565 (FedFomo), 2110.08394 (APPLE).
"""

import copy
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.methods.reference import plain
from tests.methods.reference.plain import Result, Setting, Turn, Weights


def similarity(a: Tensor, b: Tensor) -> float:
    return float(a @ b / max(float(a.norm() * b.norm()), 1e-12))


def bipartition(changes: dict[int, Tensor], best: Any) -> list[list[int]]:
    """Merge the two groups most alike until two are left; `best` of their members' similarities."""
    groups = [[i] for i in changes]
    while len(groups) > 2:

        def likeness(pair: tuple[int, int]) -> float:
            members = itertools.product(groups[pair[0]], groups[pair[1]])
            return best(similarity(changes[i], changes[j]) for i, j in members)

        a, b = max(itertools.combinations(range(len(groups)), 2), key=likeness)
        groups[a] += groups.pop(b)
    return sorted(map(sorted, groups))


def cfl(s: Setting, method: Any) -> Result:
    """Over sets of clients' numbers; statistics stay with the client."""
    m, names = method, s.names
    clusters: list[tuple[list[int], Weights]] = [(list(s.everyone), s.initial)]
    own = s.each(plain.pick(s.initial, lambda name: name not in names))

    def model(turn: Turn) -> Weights:
        return next(w for members, w in clusters if turn.i in members) | own[turn.i]

    def groups_of(members: list[int], weights: Weights, trained: dict, t: int, room: int) -> list:
        present = [i for i in members if i in trained]
        if present != members or len(present) < 3 or t <= m.warmup or room < 1:
            return [present]
        change = {i: plain.flat(trained[i], names) - plain.flat(weights, names) for i in present}
        total = sum(len(s.clients[i].y) for i in present)
        whole = sum(len(s.clients[i].y) / total * change[i] for i in present)
        if whole.norm() >= m.eps1 or max(d.norm() for d in change.values()) <= m.eps2:
            return [present]
        return bipartition(change, max if m.linkage == "single" else min)

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        nonlocal clusters
        after, new_clusters = [], []
        for members, weights in clusters:
            room = m.clusters - len(clusters) - len(new_clusters)
            groups = groups_of(members, weights, trained, t, room)
            new_models = [
                plain.average(s, {i: trained[i] for i in group}) for group in groups if group
            ]
            first = groups[0] if len(groups) > 1 else members
            after.append((first, new_models[0] if new_models else weights))
            new_clusters += zip(groups[1:], new_models[1:], strict=True)
        clusters = after + new_clusters
        for i, end in trained.items():
            own[i] = {k: end[k] for k in own[i]}
        return {}

    def extras(_: Any) -> dict[str, Tensor]:
        cluster_of = {i: c for c, (members, _) in enumerate(clusters) for i in members}
        return {"cluster_of": torch.tensor([cluster_of[i] for i in s.everyone])}

    return plain.play(s, begin=model, merge=merge, extras=extras)


def ifca(s: Setting, models: list[Weights], shared: tuple[str, ...] = ()) -> Result:
    """`models`: the clusters' initial ones. `shared`: prefixes of what is averaged over the whole
    cohort.
    """
    models, cluster_of, result = copy.deepcopy(models), {}, Result()

    def nearest(i: int) -> int:
        """Find the first model of least training loss."""
        client, losses = s.clients[i], []
        for weights in models:
            logits = plain.still(s, weights)(client.x).double()
            losses.append(float(F.cross_entropy(logits, client.y)))
        result.margins.append(sorted(losses)[1] - min(losses))
        return losses.index(min(losses))

    def begin(turn: Turn) -> Weights:
        cluster_of[turn.i] = nearest(turn.i)
        return models[cluster_of[turn.i]]

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        everyone = plain.pick(
            plain.average(s, trained), lambda name: name.startswith(shared or "\0")
        )
        shares = [
            list(map(cluster_of.get, trained)).count(j) / len(trained) for j in range(len(models))
        ]
        result.extras.append({"shares": torch.tensor(shares)})
        for j in range(len(models)):
            members = {i: end for i, end in trained.items() if cluster_of[i] == j}
            models[j] = {**models[j], **(plain.average(s, members) if members else {}), **everyone}
        result.extras[-1]["models"] = list(models)
        return {}

    def personal(turn: Turn) -> Weights:
        return models[nearest(turn.i)]

    return plain.play(s, begin=begin, merge=merge, personal=personal, result=result)


def attention(method: Any, w: dict[int, Tensor], i: int, clients: int) -> dict[int, float]:
    """Return row i of xi, pair by pair."""
    m, others = method, [j for j in w if j != i]
    if m.variant == "fedamp":
        alpha = m.share * m.sigma / (clients - 1)
        distances = {j: float(((w[i] - w[j]) ** 2).sum()) for j in others}
        xi = {j: alpha * math.exp(-distances[j] / m.sigma) / m.sigma for j in others}
    else:
        angle = {j: float(w[i] @ w[j]) / float(w[i].norm() * w[j].norm()) for j in others}
        attention_of = {j: math.exp(m.sigma * angle[j]) for j in others}
        xi = {j: m.share * attention_of[j] / sum(attention_of.values()) for j in others}
    return {**xi, i: 1 - sum(xi.values())}


def fedamp(s: Setting, method: Any) -> Result:
    m, own, clouds = method, s.each(s.initial), {}
    pool: dict[int, Weights] = {}
    participated: set[int] = set()

    def begin(turn: Turn) -> Weights:
        if turn.i not in participated:
            return own[turn.i]
        models = pool | {turn.i: own[turn.i]}
        flattened = {j: plain.flat(w, s.names) for j, w in models.items()}
        xi = attention(m, flattened, turn.i, len(s.clients))
        clouds[turn.i] = plain.mean(models.values(), [xi[j] for j in models])
        cloud = plain.pick(clouds[turn.i], lambda name: name in s.names)
        return own[turn.i] | cloud if m.start_from == "cloud" else own[turn.i]

    def local(w: Weights, turn: Turn) -> Weights:
        return plain.train(s, w, turn, anchor=clouds.get(turn.i), lam=m.pull)

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        if m.pool == "last_round":
            pool.clear()
        pool.update(trained)
        participated.update(trained)
        return {}

    return plain.play(s, local, begin, merge, own=own)


def fedfomo(s: Setting, method: Any) -> Result:
    """Where all that trained last, or ever, are candidates. `margins`: the weights found."""
    result, own, old, starts_of = Result(), s.each(s.initial), s.each(s.initial), {}
    affinity = torch.zeros(len(s.clients), len(s.clients), dtype=torch.double)
    offered: list[int] = []
    trained_ever: set[int] = set()

    def held_loss(weights: Weights, i: int) -> float:
        client = s.clients[i]
        return float(
            F.cross_entropy(plain.still(s, weights)(client.held_x).double(), client.held_y)
        )

    def mix(i: int) -> Weights:
        weights = {}
        for n in [i, *(n for n in offered if n != i)]:
            distances = float((plain.flat(own[n], s.names) - plain.flat(old[i], s.names)).norm())
            gain = held_loss(old[i], i) - held_loss(own[n], i)
            weights[n] = gain / distances if distances else 0.0
            affinity[i, n] += weights[n] if n != i else 0.0
        result.margins += [abs(weight) for weight in weights.values() if weight]
        gaining = {n: weight for n, weight in weights.items() if weight > 0}
        if not gaining:
            return own[i] if method.fallback == "keep" else old[i]
        mixed = plain.mean(
            [own[n] for n in gaining], [w / sum(gaining.values()) for w in gaining.values()]
        )
        counters = {k for k, leaf in own[i].items() if not leaf.is_floating_point()}
        return mixed | {k: max(own[n][k] for n in gaining) for k in counters}

    def begin(turn: Turn) -> Weights:
        has_weights = turn.i in trained_ever and len(s.clients[turn.i].held_y)
        starts_of[turn.i] = mix(turn.i) if has_weights else own[turn.i]
        return starts_of[turn.i]

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        old.update({i: starts_of[i] for i in trained})
        trained_ever.update(trained)
        offered[:] = sorted(trained_ever) if method.pool == "all" else list(trained)
        return {}

    told = {"extras": lambda _: {"affinity": affinity}, "result": result}
    return plain.play(s, None, begin, merge, own=own, **told)


def apple(s: Setting, method: Any, rounds: int) -> Result:
    """The update of both kinds of numbers written out."""
    m, names = method, s.names
    sizes = torch.tensor([len(client.y) for client in s.clients]).double()
    p0 = sizes / sizes.sum()
    p, cores = s.each(p0), s.each(plain.pick(s.initial, lambda name: name in names))
    buffers, trained_cores = s.each(plain.pick(s.initial, lambda name: name not in names)), {}

    def combine(i: int, own: Weights | None = None) -> Weights:
        models = cores | ({i: own} if own else {})
        return plain.mean(models.values(), p[i].tolist()) | buffers[i]

    def local(_: Any, turn: Turn) -> Weights:
        """Take simultaneous steps of SGD with momentum on core i and p; others hold still."""
        i, r, last = turn.i, turn.t - 1, m.until * rounds
        schedule = (
            (math.cos(math.pi * r / last) + 1) / 2 if m.schedule == "cosine" else 1e-3 ** (r / last)
        )
        penalty, first, core = m.mu * schedule if r < last else 0.0, p[i], dict(cores[i])
        velocity, velocity_p = {k: torch.zeros_like(core[k]) for k in names}, torch.zeros_like(p0)
        for x, y in plain.minibatches(s, turn, range(s.epochs)):
            model = plain.load(s, combine(i, core)).train()
            F.cross_entropy(model(x), y).backward()
            g = {k: leaf.grad for k, leaf in model.named_parameters()}
            buffers[i] = {k: b.clone() for k, b in model.named_buffers()}
            rows = (cores | {i: core}).values()
            slope = torch.stack([plain.flat(g, names) @ plain.flat(w, names) for w in rows])
            for k in names:
                step = float(p[i][i]) * g[k] + s.weight_decay * core[k]
                velocity[k] = s.momentum * velocity[k] + step
                core[k] = core[k] - s.lr * velocity[k]
            step = m.rate * (slope + penalty * (p[i] - p0)) + s.weight_decay * (p[i] - first)
            velocity_p = s.momentum * velocity_p + step
            p[i] = p[i] - s.lr * velocity_p
        trained_cores[i] = core
        return combine(i, core)

    def merge(_: Any, trained: Any, t: int) -> Weights:
        cores.update(trained_cores)
        trained_cores.clear()
        return {}

    def extras(_: Any) -> dict[str, Any]:
        return {"cores": plain.stack(cores.values()), "p": torch.stack([*p.values()]).float()}

    return plain.play(s, local, lambda turn: combine(turn.i), merge, extras=extras)
