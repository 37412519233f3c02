"""Methods beside their plain loops: what is compared, how closely, and in which world."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedpfl import methods as m
from fedpfl.engine import Local, make_initial_state
from fedpfl.engine.keys import Draws, generator
from fedpfl.ground import tree
from fedpfl.methods.fedcp import BANK
from fedpfl.methods.shared.gaussian import unpack_symmetric
from tests.conftest import COHORTS, CPU, LOCAL, tiny
from tests.methods.reference import (
    groups,
    heads,
    lora,
    masks,
    models,
    pfedfda,
    plain,
    submodels,
    whole,
)
from tests.methods.reference.conftest import SEED, draw_order, draw_randoms, draw_turns, make_world
from tests.methods.reference.submodels import Sets

LONGER = [*COHORTS, [0, 2, 4, 8, 9]]
PLANNED = 3  # rounds of FedPHP's run; half the clients join each: int(1.5) times are expected
NORM = ("norm",)
EVERYONE = list(range(10))

Loops = Callable[[plain.Setting], plain.Result]
Tolerance = tuple[float, float]  # absolute, relative


@dataclass(frozen=True)
class RoundReport:
    """What the package says after a round."""

    method: Any
    state: Any
    outcome: Any
    cohort: list[int]

    @property
    def server(self) -> Any:
        return self.state.server

    @property
    def clients(self) -> Any:
        return self.state.clients


def shared_model(report: RoundReport) -> Any:
    """The model alone: FedBABU's server keeps the head apart, others an optimiser's moments."""
    role = next(iter(report.method.buffers()))
    model = report.server.get("body", report.server.get("model", report.server))
    return {**model, **report.state.server_buffers.get(role, {})}


def nothing(report: RoundReport) -> Any:
    return {}


@dataclass(frozen=True)
class Case:
    """A method, and its rounds by plain loops.

    tolerance: of parameters of order 0.1; another memory layout of the convolution and a float64
    average leave rounding only. `statistics`, `personal_tolerance`, `extras_tolerance`: where
    others hold.
    shared, extras: where the package has what the loops call so. evaluated: whether the clients'
    models or, `logits`, what they say is compared.
    margin: how far anything lies from a threshold at least. check: what makes the case worth
    something. rounds: how many are
    planned, if the method asks.
    """

    method: Any
    loops: Loops
    world: str = ""
    tolerance: Tolerance = (1e-6, 0.0)
    cohorts: list[list[int]] = dataclasses.field(default_factory=lambda: COHORTS)
    local: Local = LOCAL
    shared: Callable[[RoundReport], Any] = shared_model
    extras: Callable[[RoundReport], Any] | None = None
    evaluated: str = "weights"
    statistics: Tolerance | None = None
    personal_tolerance: Tolerance | None = None
    extras_tolerance: Tolerance | None = None
    margin: float = 0.0
    check: Callable[[plain.Result], bool] = lambda want: True
    rounds: int = 3


def normed(method: Any, loops: Loops, **values: Any) -> Case:
    """With BatchNorm, which divides by small spreads."""
    return Case(method, loops, **{"world": "norm", "tolerance": (5e-6, 1e-5), **values})


def longer(method: Any, loops: Loops, margin: float = 1e-7, **values: Any) -> Case:
    return Case(method, loops, cohorts=LONGER, margin=margin, **values)


CASES: dict[str, Case] = {}

# One model, or two

CASES |= {
    "fedavg": Case(m.FedAvg(), models.fedavg),
    "fedavg-norm": normed(m.FedAvg(), models.fedavg),
    "fedprox": Case(m.FedProx(mu=0.5), lambda s: models.fedavg(s, mu=0.5)),
    "fedavgm": Case(m.FedAvgM(0.3, 0.5), lambda s: models.fedopt(s, "avgm", 0.3, 0.5)),
    "fedadam": Case(
        m.FedAdam(0.1, 0.5, 0.6, 0.05), lambda s: models.fedopt(s, "adam", 0.1, 0.5, 0.6, 0.05)
    ),
    "fedyogi": Case(m.FedYogi(), lambda s: models.fedopt(s, "yogi", 0.01, 0.9, 0.99, 0.001)),
    "fedobp": Case(m.FedOBP(q=0.9), lambda s: whole.fedobp(s, 0.9), margin=1e-5),
    "fedper": Case(m.FedPer(), lambda s: plain.split(s, lambda name: name in plain.HEAD)),
    "ditto": Case(m.Ditto(lam=0.7), lambda s: models.ditto(s, 0.7, LOCAL.epochs)),
    "local_only": Case(m.LocalOnly(), lambda s: plain.split(s, lambda name: True)),
    "lg_fedavg": Case(m.LGFedAvg(), lambda s: models.lg_fedavg(s, "classifier")),
    "lg_fedavg-as_published": Case(
        m.LGFedAvg(variant="as_published"), lambda s: models.lg_fedavg(s, "conv")
    ),
    "fedbn": normed(m.FedBN(), lambda s: plain.split(s, lambda name: name.startswith(NORM))),
    "fedrep": Case(m.FedRep(), lambda s: models.fedrep(s, 1, 1)),
    "fedbabu": Case(m.FedBABU(), models.fedbabu),
}
PLAIN = dataclasses.replace(LOCAL, momentum=0.0, weight_decay=0.0)
CASES["scaffold"] = Case(  # controls are gradients; the formula divides small differences by lr
    m.Scaffold(server_lr=0.5),
    lambda s: whole.scaffold(s, 0.5),
    tolerance=(2e-6, 0.0),
    local=PLAIN,
)
CASES |= {  # the server's step divides by alpha in the loops and not in the method
    f"feddyn-{judge}": Case(
        m.FedDyn(alpha, judge),
        lambda s, alpha=alpha, judge=judge: models.feddyn(s, alpha, judge),
        tolerance=(2e-6, 0.0),
        extras=lambda report: {
            "g": tree.map(lambda dual: -report.method.alpha * dual, report.clients["dual"])
        },
    )
    for alpha, judge in [(0.1, "cloud"), (0.5, "all")]
}


def last_models(report: RoundReport) -> Any:
    return {"last": {**report.clients["last"], **report.state.client_buffers.get("last", {})}}


CASES |= {
    "moon-norm": normed(m.Moon(5.0, 0.2), lambda s: models.moon(s, 5.0, 0.2), extras=last_models),
}
CASES |= {
    name: Case(
        method,
        lambda s, a=method: models.fedphp(s, a.transfer, a.lam, a.momentum, PLANNED),
        world,
        tolerance=(2e-5 if method.transfer == "mmd" else 5e-6, 1e-5),
        cohorts=LONGER,  # some come more often than expected
        rounds=PLANNED,
    )
    for name, world, method in [
        ("fedphp", "", m.FedPHP("kd", 0.1, 0.9, 0.5)),
        ("fedphp-mmd-norm", "norm", m.FedPHP("mmd", 0.3, 0.9, 0.5)),
    ]
}
CASES |= {
    "pfedsd-norm": normed(m.PFedSD(), lambda s: models.pfedsd(s, 0.5, 3.0)),
    "pfedsd-train": normed(
        m.PFedSD(1.0, 1.0, teacher="train"), lambda s: models.pfedsd(s, 1.0, 1.0, is_still=False)
    ),
}
PFEDME = m.PFedMe(
    lam=8.0, inner_steps=2, inner_lr=0.09, outer_lr=0.05, beta=1.5, mu=0.01, average="samples"
)
CASES |= {
    "pfedme": normed(m.PFedMe(), lambda s: models.pfedme(s, m.PFedMe())),
    "pfedme-samples": Case(PFEDME, lambda s: models.pfedme(s, PFEDME)),
}
SMALL = dataclasses.replace(LOCAL, batch_size=8)  # most clients have three minibatches then
CASES |= {
    f"per_fedavg-{version}-{world or 'plain'}": (normed if world else Case)(
        m.PerFedAvg(version, inner_lr=0.2, outer_lr=0.05, delta=0.05),
        lambda s, v=version: models.per_fedavg(s, v == "hf", 0.2, 0.05, 0.05),
        local=SMALL,
    )
    for version, world in [("fo", "norm"), ("hf", "norm")]
}


def alphas(report: RoundReport) -> Any:
    own = {**report.clients["v"], **report.state.client_buffers["v"]}
    return {"alpha": report.clients["alpha"], "v": own}


def have_moved(want: plain.Result) -> bool:
    values = want.extras[-1]["alpha"]
    return len(values.unique()) > 5 and bool(((values > 0) & (values < 1)).all())


APFL = {
    "output": (m.APFL(alpha_lr=0.5), (0.5, "output", 0.5, 0.02), have_moved),
    "param": (
        m.APFL(0.3, mixing="param", alpha_lr=0.2, alpha_decay=0.1),
        (0.3, "param", 0.2, 0.1),
        have_moved,
    ),
}
CASES |= {
    f"apfl-{name}-{world or 'plain'}": (normed if world else Case)(
        method,
        lambda s, values=values: models.apfl(s, *values),
        extras=alphas,
        evaluated="logits",
        personal_tolerance=(2e-5, 0.0),
        check=check,
    )
    for (name, (method, values, check)), world in zip(APFL.items(), ("", "norm"), strict=True)
}


def sample_order(purpose: str) -> Any:
    return lambda t, i: draw_order(purpose, "weights")(t, i, 0, len(make_world("")[2].clients[i].y))


CASES |= {
    f"fedala-{number}": Case(
        method,
        lambda s, a=method, layers=layers: models.fedala(
            s, layers, a, sample_order("train"), sample_order("adapt")
        ),
        tolerance=(5e-6, 0.0),
    )
    for number, (method, layers) in enumerate(
        [
            (m.FedALA(), ("classifier",)),
            (m.FedALA(layers=2, eta=5.0, share=1.0), ("classifier", "fc")),
        ]
    )
}
CASES |= {
    name: Case(
        method,
        lambda s, a=method: models.knn_per(s, a),
        world,
        tolerance=(5e-6, 1e-5),
        check=lambda want, a=method: a.lam is not None or want.counts[0] > 1,
    )
    for name, world, method in [
        ("knn_per-norm", "norm", m.KNNPer(k=10, lam=0.5)),
        ("knn_per-logits", "held", m.KNNPer(3, 0.8, 0.05, distance="euclidean", mix="logits")),
        ("knn_per-tuned", "held", m.KNNPer(k=5, lam=None, scale=0.1)),
    ]
}


def hypernetwork(told_learned: Any) -> dict[str, Tensor]:
    """By torch's names."""
    pairs = zip(told_learned["weight"].items(), told_learned["bias"].values(), strict=True)
    layers = {
        f"out.{k.replace('.', '-')}": {"weight": w, "bias": b.flatten()} for (k, w), b in pairs
    }
    layers |= {f"mlp.{place}": own for place, own in told_learned["mlp"].items()}
    flat = {f"{name}.{part}": leaf for name, own in layers.items() for part, leaf in own.items()}
    return {"embedding.weight": told_learned["v"], **flat}


def pfedhn_loops(method: Any) -> Loops:
    """From the method's own initial values."""

    def loops(s: plain.Setting) -> plain.Result:
        net = make_world("")[0]
        server, client = method.init(net.params, dataclasses.replace(net.parts, clients=10))
        like, learned = tree.drop(net.params, client["head"]), server["learned"]
        sizes = learned["v"].shape[1], method.hidden, method.depth
        network = models.HyperNetwork(10, *sizes, like)
        network.load_state_dict(hypernetwork(learned))
        return models.pfedhn(s, network, method)

    return loops


FEW = {"hidden": 10, "lr": 0.05}
CASES |= {
    f"pfedhn-{name}": Case(
        method,
        pfedhn_loops(method),
        tolerance=(2e-6, 1e-5),
        shared=nothing,
        extras=lambda report: {"learned": hypernetwork(report.server["learned"])},
        extras_tolerance=(1e-6, 1e-5),
    )
    for name, method in {
        "sequential": m.PFedHN(order="sequential", rows="all", depth=1, embedding_lr=0.2, **FEW),
        "clipped": m.PFedHN(rows="all", clip=0.02, weight_decay=0.0, **FEW),
        "pc": m.PFedHN(variant="pc", momentum=0.5, embedding=4, clip=0.0, weight_decay=0.1, **FEW),
    }.items()
}

# Clusters and clouds

GATHERED = [EVERYONE, EVERYONE, [0, 1, 2, 4, 5, 8], EVERYONE, [1, 3, 4, 6, 7]]
CASES |= {  # at lengths that split whatever may be split
    f"cfl-{name}": (normed if world else Case)(
        method,
        lambda s, a=method: groups.cfl(s, a),
        world=f"moving {world}",  # who makes no step, has no direction
        cohorts=GATHERED,
        shared=nothing,
        extras=lambda report: {"cluster_of": report.server["cluster_of"][:10]},
        check=lambda want, count=count: want.extras[-1]["cluster_of"].max() == count - 1,
    )
    for name, world, count, method in [
        ("single", "", 4, m.CFL(eps1=9.0, eps2=0.0, warmup=1)),
        ("lengths", "norm", 3, m.CFL(eps1=0.25, eps2=0.3, warmup=0, linkage="complete")),
    ]
}


def cluster_models(method: Any, server: Any) -> list[Any]:
    """Each cluster's parameters and statistics."""
    banks = [server["models"], server["statistics"]]
    return [
        {**server["shared"], **tree.take(banks[0], j), **tree.take(banks[1], j)}
        for j in range(method.clusters)
    ]


def ifca_loops(method: Any, world: str, shared: tuple[str, ...]) -> Loops:
    def loops(s: plain.Setting) -> plain.Result:
        first = make_initial_state(method, make_world(world)[0], 10, CPU).server
        return groups.ifca(s, cluster_models(method, first), shared)

    return loops


def clusters(report: RoundReport) -> Any:
    shares = [report.outcome.metrics[f"cluster_{j + 1}"] for j in range(report.method.clusters)]
    return {"shares": torch.tensor(shares), "models": cluster_models(report.method, report.server)}


CASES |= {
    f"ifca-{name}": (normed if world else Case)(
        method,
        ifca_loops(method, world, shared),
        shared=nothing,
        extras=clusters,
        margin=1e-5,
        check=lambda want: any(own["shares"].max() < 1 for own in want.extras),
    )
    for name, world, shared, method in [
        ("three", "norm", (), m.IFCA(clusters=3)),
        ("shared", "", ("conv", "fc"), m.IFCA(clusters=3, layers=1)),
    ]
}
CASES |= {  # at a sigma of the order of these networks' squared distances
    name: Case(
        method,
        lambda s, a=method: groups.fedamp(s, a),
        "norm" if method.start_from == "cloud" else "",
        tolerance=(5e-6, 1e-5),
        shared=nothing,
    )
    for name, method in {
        "fedamp-cloud": m.FedAMP(sigma=0.3, start_from="cloud", pool="last_round", pull=0.5),
        "heurfedamp": m.FedAMP("heurfedamp", sigma=20.0, share=0.8, pull=1.0),
    }.items()
}
CASES |= {
    f"fedfomo-{name}": Case(
        method,
        lambda s, a=method: groups.fedfomo(s, a),
        f"held {world}",
        tolerance=(1e-5, 1e-5) if world else (2e-6, 0.0),
        cohorts=[*COHORTS, [0, 1, 2, 5, 8]],  # the third time for some
        shared=nothing,
        extras=lambda report: {"affinity": report.clients["affinity"]},
        extras_tolerance=(1e-4, 1e-3),
        margin=1e-5,
        check=lambda want: bool((want.extras[-1]["affinity"] < 0).any()),
    )
    for name, world, method in [
        ("baseline", "", m.FedFomo(candidates=9)),
        ("norm", "norm", m.FedFomo(candidates=9, fallback="keep", pool="all")),
    ]
}


def relations(report: RoundReport) -> Any:
    """Who never took part has no p yet."""
    took_part = report.state.rows.take("facts", range(10))["participated"]
    p = torch.where(took_part[:, None], report.clients["p"], report.server["shares"])
    return {"cores": report.server["cores"], "p": p}


CASES |= {
    f"apple-{name}": Case(
        method,
        lambda s, a=method: groups.apple(s, a, 3),
        world,
        tolerance=(5e-6, 1e-5) if world else (1e-6, 0.0),
        shared=nothing,
        extras=relations,
        extras_tolerance=(5e-6, 1e-5),
    )
    for name, world, method in [
        ("exponential", "", m.APPLE(rate=0.5, mu=2.0, until=0.6)),
        ("cosine", "norm", m.APPLE(rate=2.0, mu=1.0, schedule="cosine", until=2.0)),
    ]
}

# Low-rank adapters


def is_own_b(name: str) -> bool:
    return name.endswith("lora_B") or name.startswith("classifier.")


def drawn_pairs(t: int, i: int) -> Any:
    """What FedALT draws for a client in a round, by the engine's generator."""
    params = tiny(pairs=2).params
    server = {"drawn": plain.pick(params, lambda name: name.endswith(".lora_A"))}
    return m.FedALT("own").sample(server, Draws(SEED, "train", t).server(i))["drawn"]


LORA = {
    "fedavg": (m.FedAvg(), lora.by_name),
    "fedsa_lora": (m.FedSALoRA(), lambda s: lora.by_name(s, is_own_b)),
    "fedsa_lora-averaged": (
        m.FedSALoRA("averaged"),
        lambda s: lora.by_name(s, lambda name: name.endswith("lora_B")),
    ),
    "ffa_lora": (m.FFALoRA(), lambda s: lora.by_name(s, is_moving=is_own_b)),
    "ffa_lora-frozen": (
        m.FFALoRA("frozen"),
        lambda s: lora.by_name(s, is_moving=lambda name: name.endswith("lora_B")),
    ),
    "fedalt": (m.FedALT(), lora.fedalt),
    "fedalt-own": (m.FedALT("own"), lambda s: lora.fedalt(s, drawn_pairs)),
    "sdflora": (m.SDFLoRA(0.5), lambda s: lora.sdflora(s, 1, True, True)),
}
CASES |= {
    f"{name}-lora": Case(
        method, loops, f"lora{method.pairs or 1}", tolerance=(2e-6, 0.0), shared=nothing
    )
    for name, (method, loops) in LORA.items()
}

# Features and heads

CASES |= {
    name: Case(
        method,
        lambda s, a=method: heads.fedas(s, a, draw_order(stream="align")),
        world,
        tolerance=(5e-6, 1e-5),
    )
    for name, world, method in [
        ("fedas-norm", "norm", m.FedAS(align_lr=0.01)),
        ("fedas-init", "", m.FedAS(align_lr=0.1, align_epochs=2, first="init", judge="received")),
        (
            "fedas-means",
            "",
            m.FedAS(align_lr=0.1, first="global", align="means", weights="samples"),
        ),
    ]
}
CASES |= {  # regularisers and mixtures add a rounding or two to a step's
    f"fedrod-{gamma}": Case(
        m.FedRoD(gamma=gamma), lambda s, gamma=gamma: heads.fedrod(s, gamma), tolerance=(2e-6, 0.0)
    )
    for gamma in (0.5, 1.0)
}
CASES |= {
    f"flute-{number}": Case(
        m.FLUTE(*values),
        lambda s, values=values: heads.flute(s, *values),
        world,
        tolerance=(1e-5, 1e-4) if world else (2e-6, 0.0),
    )
    for number, (world, values) in enumerate(
        [
            ("norm", (0.25, 0.0025, 0.0005, 0.5, 1)),
        ]
    )
}
CASES |= {
    f"fedpac-{name}": Case(
        m.FedPAC(*values),
        lambda s, v=values: heads.fedpac(s, v[0], v[1], v[2] or LOCAL.epochs, v[3]),
        world,
        tolerance=(1e-5, 1e-4) if world else (1e-5, 0.0),
        margin=1e-5,
    )
    for name, world, values in [
        ("two", "", (5.0, 2, 1, 0.02)),
        ("norm", "norm", (1.0, 1, None, 0.1)),
    ]
}


def prototypes(report: RoundReport) -> Any:
    there = {str(c): row for c, row in enumerate(report.server["mean"]) if report.server["seen"][c]}
    return {"mean": there, "seen": report.server["seen"]}


CASES |= {
    f"fedproto-{values[3]}{'-norm' if world else ''}": Case(
        m.FedProto(*values),
        lambda s, values=values: heads.fedproto(s, *values),
        world,
        tolerance=(5e-6, 1e-5),
        shared=nothing,
        extras=prototypes,
    )
    for world, values in [
        ("", (1.0, "last_epoch", "uniform", "nearest")),
        ("", (5.0, "all_epochs", "counts", "nearest_own")),
        ("norm", (3.0, "final", "uniform", "head")),
    ]
}
POLICY = {"0.weight": "weight", "0.bias": "bias", "1.weight": "scale", "1.bias": "shift"}


def draw_noise(t: int, i: int, epoch: int) -> Tensor:
    """A pair of numbers for each feature, whose difference is logistic: all that a softmax of two
    sees of noise.
    """
    bank = torch.rand(2, BANK, 12, generator=Draws(SEED, "train", t).server(i))
    one, other = (BANK * draw_randoms(t, i, epoch, m.FedCP().randoms)).long().unbind(1)
    uniform = ((bank[0, one] + bank[1, other]) % 1).clamp(1e-6, 1 - 1e-6)
    return torch.stack([torch.log(uniform), torch.log(1 - uniform)], 1)


def fedcp_loops(method: Any) -> Loops:
    def loops(s: plain.Setting) -> plain.Result:
        net = make_world("")[0]
        policy = method.init(net.params, net.parts)[0]["policy"]
        given = {theirs: policy[own] for theirs, own in POLICY.items()}
        noise = draw_noise if method.policy_noise == "train" else None
        return heads.fedcp(s, given, method.lam, noise)

    return loops


def short_head(head: Any) -> Any:
    return {name.split(".")[1]: leaf for name, leaf in head.items()}


def fedcp_server(report: RoundReport) -> Any:
    policy = {theirs: report.server["policy"][own] for theirs, own in POLICY.items()}
    body = {**report.server["body"], **report.state.server_buffers["main"]}
    return {"body": body, "head": short_head(report.server["head"]), "policy": policy}


def client_heads(report: RoundReport) -> list[Any]:
    return [tree.take(report.clients["head"], i) for i in EVERYONE]


CASES |= {  # kernels of distances by another formula
    f"fedcp-{name}": Case(
        method,
        fedcp_loops(method),
        world,
        tolerance=(2e-5, 1e-4) if world else (1e-5, 0.0),
        shared=fedcp_server,
        extras=lambda report: {"own": [short_head(head) for head in client_heads(report)]},
        evaluated="logits",
        personal_tolerance=(1e-4, 1e-4),
    )
    for name, world, method in [
        ("noise-norm", "norm", m.FedCP()),
        ("off", "", m.FedCP(lam=0.3, policy_noise="off")),
    ]
}
VALVE = {"weight": "0.weight", "bias": "0.bias", "scale": "2.weight", "shift": "2.bias"}


def valve_modules(server: Any) -> Any:
    """The valve and the embeddings, as the plain loops call them."""
    parts = server["valve"].items()
    named = {f"{part}.{VALVE[name]}": leaf for part, own in parts for name, leaf in own.items()}
    return {"embeddings.weight": server["embeddings"], **named}


def gpfl_loops(values: Any) -> Loops:
    def loops(s: plain.Setting) -> plain.Result:
        net = make_world("")[0]
        return heads.gpfl(s, valve_modules(m.GPFL(*values).init(net.params, net.parts)[0]), *values)

    return loops


CASES |= {  # a layer normalisation and cosines divide by small numbers
    f"gpfl-{values[2]}{'-norm' if world else ''}": Case(
        m.GPFL(*values),
        gpfl_loops(values),
        world,
        tolerance=(2e-5, 1e-4),
        shared=lambda report: {
            "model": shared_model(report),
            "extra": valve_modules(report.server),
        },
        extras=lambda report: {"head": client_heads(report)},
        evaluated="",
    )
    for world, values in [("", (0.01, 0.1, "frobenius")), ("norm", (0.3, 0.0, "mean"))]
}


def biases(report: RoundReport) -> Any:
    (mean,), (u,) = report.server["mean"].values(), report.clients["u"].values()
    return {"mean": mean, "u": u}


CASES |= {
    f"feddbe-{number}": Case(
        method,
        lambda s, a=method: heads.feddbe(s, a, draw_order("gather")),
        tolerance=(2e-6, 0.0),
        extras=biases,
        extras_tolerance=(1e-6, 0.0),
        evaluated="logits",
    )
    for number, method in enumerate(
        [
            m.FedDBE(kappa=20.0, rho=0.3, bias_lr=0.5),
            m.FedDBE(kappa=20.0, rho=0.6, bias_lr=0.1, mean="data"),
        ]
    )
}


def generator_modules(made: Any) -> Any:
    """By torch's names."""
    layers = made["learned"].items()
    learned = {f"{layer}.{k}": leaf for layer, own in layers for k, leaf in own.items()}
    moved = made["moved"]
    return {**learned, "norm.running_mean": moved["mean"], "norm.running_var": moved["variance"]}


def fedgen_loops(method: Any) -> Loops:
    def drawn(t: int, labels: list[int]) -> Any:
        shape = method.steps, method.batch, 1 + method.noise
        for own in torch.rand(*shape, generator=generator(SEED, "aggregate", t)):
            yield torch.tensor(labels)[(len(labels) * own[:, 0]).long()], own[:, 1:]

    def loops(s: plain.Setting) -> plain.Result:
        net, made = make_world("")[0], heads.Generator(method.noise, method.hidden)
        first = method.init(net.params, net.parts)[0]["generator"]
        made.load_state_dict(generator_modules(first), strict=False)
        random = lambda t, i, epoch: draw_randoms(t, i, epoch, 2 * method.noise + 1)  # noqa: E731
        return heads.fedgen(s, made, method, random, drawn)

    return loops


TAUGHT = {"noise": 6, "hidden": 9, "steps": 4, "batch": 8, "lr": 0.02}
CASES |= {  # Adam divides small gradients by their size, which amplifies rounding
    f"fedgen-{name}": Case(
        method,
        fedgen_loops(method),
        tolerance=(5e-6, 0.0),
        shared=lambda report: {**report.server["body"], **report.server["head"]},
        extras=lambda report: {"generator": generator_modules(report.server["generator"])},
        extras_tolerance=(2e-5, 1e-4),
    )
    for name, method in {
        "paper": m.FedGen(
            teacher="mean_logits", labels="frequency", alpha=3.0, decay=0.5, **TAUGHT
        ),
        "other": m.FedGen(beta=0.0, alpha=2e-4, decay=0.3, weight_decay=0.1, **TAUGHT),
    }.items()
}


def floco_loops(method: Any, plus: Any) -> Loops:
    def random(purpose: str) -> Any:
        numbers = method.endpoints + 1
        return lambda t, i, epoch, steps: Draws(SEED, purpose, t).random(
            i, "main", epoch, steps, numbers
        )

    def loops(s: plain.Setting) -> plain.Result:
        net = make_world("")[0]
        ends = method.init(net.params, net.parts)[0]["endpoints"][plain.HEAD[0]]
        return heads.floco(s, ends, method, random, draw_order("gather"), plus)

    return loops


CASES |= {  # centres come from the singular vectors of 10 clients' small differences
    f"floco-{name}": Case(
        method,
        floco_loops(method, plus),
        tolerance=(1e-5, 0.0),
        shared=lambda report: {**report.server["shared"], **report.server["endpoints"]},
    )
    for name, method, plus in [
        ("wide", m.Floco(endpoints=4, tau=2, rho=0.5), None),
        ("plus", m.FlocoPlus(endpoints=3, tau=1, pers_epochs=2, lam=0.7), (2, 0.7)),
    ]
}


def pfedfda_server(report: RoundReport) -> Any:
    cov = unpack_symmetric(report.server["cov"])
    return {"body": report.server["body"], "mean": report.server["mean"], "cov": cov}


def pfedfda_loops(s: plain.Setting) -> plain.Result:
    net = make_world("")[0]
    return pfedfda.pfedfda(s, m.PFedFDA().init(net.params, net.parts)[0]["mean"])


CASES["pfedfda"] = Case(  # the search for beta stops where its steps are that small
    m.PFedFDA(),
    pfedfda_loops,
    cohorts=COHORTS[:2],  # as each search takes long
    tolerance=(1e-4, 1e-4),
    shared=pfedfda_server,
    evaluated="logits",
    personal_tolerance=(1e-3, 1e-3),
)

# Entries of one's own

SEVERAL = (0.3, 0.7, 0.9, 0.98)
CASES["fedobp_adaptive"] = Case(
    m.FedOBPAdaptive(q=SEVERAL),
    lambda s: masks.fedobp_choosing(s, list(SEVERAL)),
    "held",  # three clients are too small to hold anything out
    cohorts=[*COHORTS, *COHORTS[:2]],
    extras=lambda report: {"q": report.clients["q"][report.cohort]},
    margin=1e-5,
    check=lambda want: {q for own in want.extras for q in own["q"].tolist()} == {*SEVERAL},
)
CASES |= {
    f"feddpa-{name}": Case(
        method,
        lambda s, v=values: masks.feddpa(s, *v, draw_order(stream="personal")),
        tolerance=(1e-5, 0.0),
        margin=1e-6,
    )
    for name, values, method in [
        (
            "phases",
            ("value", 0.05, (0.5, 0.3, 0.2)),
            m.FedDPA(threshold=0.05, lam1=0.5, lam2=0.3, clip=0.2),
        ),
        (
            "as_compared",
            ("quantile", m.FedDPA().threshold, None),
            m.FedDPA(rule="quantile", train="joint"),
        ),
    ]
}


def fedselect_loops(method: Any) -> Loops:
    return lambda s: masks.fedselect(s, method, draw_order(stream="personal"))


FEDSELECT = {
    "fedselect-all": m.FedSelect(p=0.3, scope="all", lr_v=0.02, lr_u=0.08),
    "fedselect-window": m.FedSelect(p=0.4, delta="window", every=1),
}
CASES |= {name: longer(method, fedselect_loops(method)) for name, method in FEDSELECT.items()}
CASES["fedselect-norm"] = normed(m.FedSelect(), fedselect_loops(m.FedSelect()), margin=1e-6)
CASES |= {
    "pspfl-norm": normed(m.PSPFL(0.5), lambda s: masks.pspfl(s, 0.5, "shared"), margin=1e-6),
    "pspfl-all": longer(m.PSPFL(0.7, "all"), lambda s: masks.pspfl(s, 0.7, "all")),
}
CASES |= {
    f"seqfededt-{values[0]}{'-norm' if world else ''}": (normed if world else longer)(
        m.SeqFedEDT(*values[:2], classifier_only=len(values) > 2),
        lambda s, values=values: masks.seqfededt(s, draw_turns, *values),
        margin=1e-6 if world else 1e-4,
    )
    for world, values in [
        ("norm", ("squared", 0.9)),
        ("", ("importance", 0.3)),
        ("", ("difference", 0.5, "classifier")),
    ]
}
PURIN = {
    "fedpurin": (m.FedPURIN(beta=6), NORM),
    "fedpurin-delta": (m.FedPURIN(tau=0.7, beta=3, score="delta", judge="dense"), NORM),
    "fedpurin-hessian": (m.FedPURIN(tau=0.2, hessian=True, include_norm=True, cutoff=-1.0), ()),
    "fedcac": (m.FedCAC(beta=6), ()),
    "fedcac-cutoff": (m.FedCAC(tau=0.9, cutoff=2e-4), ()),
}


def critical(report: RoundReport) -> Any:
    rows = [leaf[report.cohort].flatten(1).sum(1) for leaf in report.clients["mask"].values()]
    return {"partners": report.clients["partners"][report.cohort], "counts": sum(rows)}


def differ_in_partners(want: plain.Result) -> bool:
    return len({n for own in want.extras for n in own["partners"].tolist()}) > 1


CASES |= {
    f"{name}{'-norm' if world else ''}": Case(
        method,
        lambda s, a=method, own=own: masks.fedpurin(s, a, own),
        world,
        tolerance=(5e-6, 0.0) if world else (1e-6, 0.0),
        cohorts=COHORTS if world else LONGER,
        extras=critical,
        margin=1e-5,
        check=differ_in_partners,
    )
    for name, (method, own) in PURIN.items()
    for world in ("", "norm")
    if not world or name in ("fedpurin-delta", "fedcac")
}

# Sub-models

WIDTHS = (0.3, 0.5, 0.8, 1.0)
RATES = (0.0, 0.25, 0.5, 0.75)


def width(t: int, i: int) -> float:
    """Blocks of the ten clients: 3, 2, 3, 2."""
    return WIDTHS[i * 4 // 10]


def drawn_width(t: int, i: int) -> float:
    return WIDTHS[int(torch.randint(4, (), generator=Draws(SEED, "train", t).server(i)))]


def sizes(i: int) -> tuple[int, int]:
    return max(1, int(width(1, i) * 4 + 1e-9)), max(1, int(width(1, i) * 12 + 1e-9))


def first(share: float) -> Sets:
    return list(range(math.ceil(share * 4 - 1e-9))), list(range(math.ceil(share * 12 - 1e-9)))


def prefix(t: int, i: int) -> Sets:
    a, b = sizes(i)
    return list(range(a)), list(range(b))


def fixed(t: int, i: int) -> Sets:
    return first(width(t, i))


def rolled(t: int, i: int) -> Sets:
    """In the order of the window, which wraps."""
    a, b = sizes(i)
    return [(t - 1 + q) % 4 for q in range(a)], [(t - 1 + q) % 12 for q in range(b)]


def drawn_by_lot(t: int, i: int, counts: tuple[int, int]) -> Sets:
    """The highest of the lots that the server draws, layer by layer."""
    lots = torch.rand(16, generator=Draws(SEED, "train", t).server(i))
    parts = zip((lots[:4], lots[4:]), counts, strict=True)
    channels, units = (sorted(own.topk(count).indices.tolist()) for own, count in parts)
    return channels, units


def drawn(t: int, i: int) -> Sets:
    return drawn_by_lot(t, i, sizes(i))


def pruned(kind: Any, score: str, begin: str) -> Case:
    def loops(s: plain.Setting) -> plain.Result:
        sets: dict[int, Sets] = {}

        def receive(turn: plain.Turn) -> Any:
            if turn.i in sets:
                return turn.shared
            received = s.initial if begin == "initial" else turn.shared
            order = draw_order(stream="ranking")(turn.t, turn.i, 0, len(s.clients[turn.i].y))
            values = {**received, **submodels.statistics(s.initial)}
            sets[turn.i] = submodels.ranked(s, turn.i, values, score, 0.05, order, sizes(turn.i))
            return received

        return submodels.play_small(s, lambda t, i: sets[i], receive=receive)

    return small(kind(widths=WIDTHS, ranking_lr=0.05, first=begin), loops)


def small(method: Any, loops: Loops, world: str = "norm", **values: Any) -> Case:
    tolerances = {"tolerance": (2e-6, 0.0), "statistics": (1e-5, 1e-5)}
    return Case(method, loops, world, **{**tolerances, **values})


CASES |= {
    "fedspu": small(m.FedSPU(widths=WIDTHS), lambda s: submodels.fedspu(s, drawn)),
    "random_dropout": small(  # whose statistics are averaged at the server
        m.RandomDropout(widths=WIDTHS, judge="own"), lambda s: submodels.play_small(s, drawn), ""
    ),
    "fjord": small(
        m.FjORD(widths=WIDTHS),
        lambda s: submodels.play_small(s, prefix, untrained=lambda i: prefix(1, i)),
    ),
    "hermes": pruned(m.Hermes, "l2", "initial"),
    "fedmp": pruned(m.FedMP, "l1", "current"),
    "prunefl": pruned(m.PruneFL, "gradient", "initial"),
}
ANY = {"weighting": "samples", "masked": False}


def heterofl(sets: Any, **values: Any) -> Loops:
    return lambda s: submodels.heterofl(s, sets, **{"untrained": lambda i: fixed(1, i), **values})


def rolex(**values: Any) -> Loops:
    return heterofl(rolled, is_equal=False, untrained=lambda i: rolled(1, i), **values)


def drawn_first(t: int, i: int) -> Sets:
    return first(drawn_width(t, i))


CASES |= {
    "heterofl-scaler": small(
        m.HeteroFL(widths=WIDTHS, scaler=True), heterofl(fixed, rate=width), ""
    ),
    "heterofl": small(m.HeteroFL(widths=WIDTHS), heterofl(fixed)),
    "heterofl-drawn": small(
        m.HeteroFL(widths=WIDTHS, dynamic=True, scaler=True, **ANY),
        heterofl(drawn_first, rate=drawn_width, is_equal=False, is_masked=False),
    ),
    "heterofl-clipping": small(
        m.HeteroFL(widths=WIDTHS),
        heterofl(fixed, clip=0.3),
        local=dataclasses.replace(LOCAL, clip=0.3),
    ),
    "fedrolex": small(m.FedRolex(widths=WIDTHS, masked=False), rolex(is_masked=False), ""),
    "fedrolex-norm": small(m.FedRolex(widths=WIDTHS, scaler=True, masked=True), rolex(rate=width)),
}


def sent_level(t: int, i: int) -> int:
    return int(torch.randint(3, (), generator=Draws(SEED, "train", t).server(i)))


def device_level(method: Any, i: int) -> int:
    """Four weak, three medium, three strong; or all of them strong."""
    return 2 if method.devices == (0, 0, 1) else (0 if i < 4 else 1 if i < 7 else 2)


def nested_levels(s: plain.Setting, apoz: tuple[float, ...]) -> list[Sets]:
    return submodels.flexfl_levels(s, apoz or (0.0, 0.0), (0.25, 0.5, 1.0), 0.05)


def flexfl_loops(method: Any) -> Loops:
    def device(i: int) -> int:
        return device_level(method, i)

    def loops(s: plain.Setting) -> plain.Result:
        return submodels.flexfl(s, nested_levels(s, method.apoz), sent_level, device, method)

    return loops


def trains_all_levels(method: Any) -> bool:
    turns = [
        (t, i) for t, cohort in enumerate(COHORTS, 1) for i in cohort if i != 9
    ]  # of one sample
    return {min(sent_level(*turn), device_level(method, turn[1])) for turn in turns} == {0, 1, 2}


CASES |= {
    f"flexfl-{world or 'plain'}": small(method, flexfl_loops(method), world, check=check)
    for world, method, check in [
        ("", m.FlexFL(apoz=(), gamma=10.0, temperature=3.0), lambda want: True),
        (
            "norm",
            m.FlexFL(apoz=(0.2, 0.7), gamma=4.0, temperature=1.5, devices=(0, 0, 1)),
            lambda want: trains_all_levels(m.FlexFL(devices=(0, 0, 1))),
        ),
    ]
}
RETURNING = [[0, 2, 3, 5, 9], [1, 2, 4, 6, 9], [2, 4, 5, 6, 9]]


def subflot_loops(method: Any) -> Loops:
    def rate(i: int) -> float:
        return RATES[i * 4 // 10]

    def first_choice(t: int, i: int) -> Sets:
        a, b = round(4 * (1 - rate(i))), round(12 * (1 - rate(i)))
        is_random = method.initial == "random"
        return drawn_by_lot(t, i, (a, b)) if is_random else (list(range(a)), list(range(b)))

    return lambda s: submodels.subflot(s, first_choice, rate, method)


GIVEN = {"rates": RATES, "assign": "blocks", "positions": "first"}
CASES |= {
    f"subflot-{name}": small(
        method,
        subflot_loops(method),
        "norm alike",  # and they learn fast, or all would be found where they began
        tolerance=(3e-6, 0.0),
        cohorts=RETURNING,
        local=dataclasses.replace(LOCAL, lr=0.3),
        check=lambda want, name=name: any(want.counts) or name == "prefix",
        rounds=0,
    )
    for name, method in {
        "one": m.SubFLOT(alpha=0.5, lam=1.0, **GIVEN),
        "balanced": m.SubFLOT(mode="balanced", alpha=0.3, lam=0.5, **GIVEN),
        "prefix": m.SubFLOT(alpha=0.8, lam=0.0, initial="prefix", **GIVEN),
        "no-extraction": m.SubFLOT(alpha=0.5, lam=1.0, otp=False, **GIVEN),
        "no-aggregation": m.SubFLOT(alpha=0.5, lam=1.0, ota=False, **GIVEN),
    }.items()
}

NAMES = """
fedavg-norm fedphp fedala-0 ifca-three lg_fedavg-as_published pfedme knn_per-norm pfedhn-clipped
fedpac-norm fedcp-off fedselect-norm fedpurin-delta-norm fedcac-cutoff heterofl-scaler
heterofl-clipping fedfomo-norm fedavg-lora fedsa_lora-averaged-lora ffa_lora-lora fedalt-lora
fedrod-1.0 seqfededt-difference fedcac-norm fedrolex flexfl-plain subflot-prefix
subflot-no-extraction subflot-no-aggregation feddyn-cloud fedpurin pspfl-norm cfl-single
feddpa-as_compared feddbe-0
"""
LEFT_TO_TEST_ALL = set(NAMES.split())
"""Whose settings others try too; what is left has each setting of a method once."""
