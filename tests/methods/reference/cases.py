"""Methods beside their plain loops: what is compared, how closely, and in which world."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedpfl import methods as m
from fedpfl.engine import Local, make_initial_state
from fedpfl.engine.keys import Draws, generator
from fedpfl.ground import tree
from fedpfl.methods.fedcp import BANK
from fedpfl.methods.shared.gaussian import unpack_symmetric
from tests.conftest import CPU, LOCAL, tiny
from tests.methods.reference import groups, heads, kinds, masks, models, plain, submodels
from tests.methods.reference.conftest import (
    COHORTS,
    RANKS,
    SEED,
    draw_order,
    draw_randoms,
    draw_turns,
    make_world,
)
from tests.methods.reference.submodels import Sets

LONGER = [*COHORTS, [0, 2, 4, 8, 9]]
PLANNED = 3  # rounds of FedPHP's run; half the clients join each: int(1.5) times are expected
EVERYONE = list(range(10))

Loops = Callable[[plain.Setting, Any], plain.Result]
Tolerance = tuple[float, float]  # absolute, relative


@dataclass(frozen=True)
class RoundReport:
    """What the package says after a round."""

    method: Any
    state: Any
    outcome: Any
    cohort: list[int]


def shared_model(report: RoundReport) -> Any:
    """The model alone: FedBABU's server keeps the head apart, others an optimiser's moments."""
    role = next(iter(report.method.buffers()))
    model = report.state.server.get("body", report.state.server.get("model", report.state.server))
    return {**model, **report.state.server_buffers.get(role, {})}


@dataclass(frozen=True)
class Case:
    """A method, and its rounds by plain loops, which are given its hyperparameters.

    tolerance: of parameters of order 0.1; another memory layout of the convolution and a float64
    average leave rounding only. looser: that of what clients are evaluated by, and of `extras`.
    shared, extras: where the package has what the loops call so. evaluated: whether the clients'
    models or, `logits`, what they say is compared.
    margin: how far anything lies from a threshold at least. check: what makes the case worth
    something. rounds: how many are planned, if the method asks.
    """

    method: Any
    loops: Loops
    world: str = ""
    tolerance: Tolerance = (1e-5, 1e-5)
    cohorts: list[list[int]] = dataclasses.field(default_factory=lambda: COHORTS)
    local: Local = LOCAL
    shared: Callable[[RoundReport], Any] = shared_model
    extras: Callable[[RoundReport], Any] | None = None
    evaluated: str = "weights"
    looser: Tolerance | None = None
    margin: float = 0.0
    check: Callable[[plain.Result], bool] = lambda want: True
    rounds: int = 3


def by_prefix(*own: str) -> Loops:
    """Parameters and statistics of these prefixes are the client's own."""
    return lambda s, a: plain.split(s, lambda name: name.startswith(own))


CASES: dict[str, Case] = {}


def add(loops: Loops, methods: dict[str, Any], world: str = "", **values: Any) -> None:
    """Add cases of one loop; those with a name that ends in norm have BatchNorm."""
    for name, method in methods.items():
        words = f"{world} norm".strip() if name.endswith("norm") else world
        CASES[name] = Case(method, loops, words, **values)


def first_server(method: Any, world: str = "") -> Any:
    """The server's initial state, from which the loops begin, too."""
    net = make_world(world)[0]
    return method.init(net.params, dataclasses.replace(net.parts, clients=10))[0]


# One model, or two

PLAIN = dataclasses.replace(LOCAL, momentum=0.0, weight_decay=0.0)
SMALL = dataclasses.replace(LOCAL, batch_size=8)  # most clients have three minibatches then
PFEDME = {"lam": 8.0, "inner_steps": 2, "inner_lr": 0.09, "outer_lr": 0.05, "beta": 1.5, "mu": 0.01}


def duals(report: RoundReport) -> Any:
    return {"g": tree.map(lambda dual: -report.method.alpha * dual, report.state.clients["dual"])}


def last_models(report: RoundReport) -> Any:
    return {"last": {**report.state.clients["last"], **report.state.client_buffers.get("last", {})}}


add(lambda s, a: plain.play(s), {"fedavg": m.FedAvg()})
add(models.centralized, {"centralized-norm": m.Centralized()})
add(models.fedprox, {"fedprox": m.FedProx(mu=0.5)})
NESTEROV = m.FedAvgM(0.3, 0.8, nesterov=True)
add(models.fedavgm, {"fedavgm": m.FedAvgM(0.3, 0.5), "fedavgm-nesterov": NESTEROV})
add(models.fedopt, {"fedadam": m.FedAdam(0.1, 0.5, 0.6, 0.05), "fedyogi": m.FedYogi()})
add(models.ditto, {"ditto": m.Ditto(lam=0.7, personal_epochs=1)})
add(by_prefix("classifier"), {"fedper": m.FedPer()})
add(by_prefix(""), {"local_only": m.LocalOnly()})
add(by_prefix("conv", "fc"), {"lg_fedavg": m.LGFedAvg()})
add(by_prefix("fc", "classifier"), {"lg_fedavg-published": m.LGFedAvg(variant="as_published")})
add(by_prefix("norm"), {"fedbn-norm": m.FedBN()})
add(lambda s, a: models.fedrep(s, 1, 1), {"fedrep": m.FedRep()})
# Nobody's head ever moves, so nobody's differs: it trains for no epoch.
add(lambda s, a: models.fedrep(s, 0, 2), {"fedbabu": m.FedBABU()})
add(models.scaffold, {"scaffold": m.Scaffold(0.5)}, local=PLAIN)
add(models.feddyn, {"feddyn": m.FedDyn(0.1), "feddyn-all": m.FedDyn(0.5, "all")}, extras=duals)
add(models.moon, {"moon-norm": m.Moon(5.0, 0.2)}, extras=last_models)
# Some come more often than expected.
FEDPHP = {
    "fedphp": m.FedPHP("kd", 0.1, 0.9, 0.5),
    "fedphp-mmd-norm": m.FedPHP("mmd", 0.3, 0.9, 0.5),
}
fedphp = partial(models.fedphp, planned=PLANNED)
add(fedphp, FEDPHP, cohorts=LONGER, tolerance=(2e-5, 1e-5))
PFEDSD = {"pfedsd-norm": m.PFedSD(), "pfedsd-train-norm": m.PFedSD(1.0, 1.0, teacher="train")}
add(models.pfedsd, PFEDSD)
SAMPLES = m.PFedMe(average="samples", **PFEDME)
add(models.pfedme, {"pfedme-norm": m.PFedMe(), "pfedme-samples": SAMPLES})
META = {"inner_lr": 0.2, "outer_lr": 0.05, "delta": 0.05}
add(
    partial(models.per_fedavg, adapt=draw_order("adapt")),
    {
        "per_fedavg-fo-norm": m.PerFedAvg("fo", adapt_steps=4, **META),
        "per_fedavg-hf-norm": m.PerFedAvg("hf", adapt_steps=1, **META),
    },
    local=SMALL,
)


def alphas(report: RoundReport) -> Any:
    own = {**report.state.clients["v"], **report.state.client_buffers["v"]}
    return {"alpha": report.state.clients["alpha"], "v": own}


def have_moved(want: plain.Result) -> bool:
    values = want.extras[-1]["alpha"]
    return len(values.unique()) > 5 and bool(((values > 0) & (values < 1)).all())


MIXED = {"mixing": "param", "alpha_lr": 0.2, "alpha_decay": 0.1, "cold_start": "global"}
APFL = {"apfl-output": m.APFL(alpha_lr=0.5), "apfl-param-norm": m.APFL(0.3, **MIXED)}
add(models.apfl, APFL, extras=alphas, check=have_moved, evaluated="logits")


def sample_order(purpose: str) -> Any:
    return lambda t, i: draw_order(purpose, "weights")(t, i, 0, len(make_world("")[2].clients[i].y))


def fedala_loops(*layers: str) -> Loops:
    return lambda s, a: models.fedala(s, layers, a, sample_order("train"), sample_order("adapt"))


def have_tuned(want: plain.Result) -> bool:
    return want.counts[0] > 1


add(fedala_loops("classifier"), {"fedala-0": m.FedALA()})
add(fedala_loops("classifier", "fc"), {"fedala-1": m.FedALA(layers=2, eta=5.0, share=1.0)})
FAR = m.KNNPer(3, 0.8, 0.05, distance="euclidean", mix="logits")
TUNED = m.KNNPer(k=5, lam=None, scale=0.1)
add(models.knn_per, {"knn_per-logits": FAR}, "held")
add(models.knn_per, {"knn_per-tuned": TUNED}, "held", check=have_tuned)


FEW = {"hidden": 10, "lr": 0.05}
add(
    lambda s, a: models.pfedhn(s, first_server(a)["learned"], a),
    {
        "pfedhn-sequential": m.PFedHN(
            order="sequential", rows="all", depth=1, embedding_lr=0.2, **FEW
        ),
        "pfedhn-clipped": m.PFedHN(rows="all", clip=0.02, weight_decay=0.0, **FEW),
        "pfedhn-pc": m.PFedHN("pc", momentum=0.5, embedding=4, clip=0.0, weight_decay=0.1, **FEW),
    },
    extras=lambda report: {"learned": report.state.server["learned"]},
)

# Clusters and clouds

GATHERED = [EVERYONE, EVERYONE, [0, 1, 2, 4, 5, 8], EVERYONE, [1, 3, 4, 6, 7]]
for count, own in [  # at lengths that split whatever may be split
    (4, {"cfl-single": m.CFL(eps1=9.0, eps2=0.0, warmup=1)}),
    (3, {"cfl-lengths-norm": m.CFL(0.25, 0.3, warmup=0, linkage="complete")}),
]:
    add(
        groups.cfl,
        own,
        "moving",  # who makes no step, has no direction
        cohorts=GATHERED,
        extras=lambda report: {"cluster_of": report.state.server["cluster_of"][:10]},
        check=lambda want, count=count: want.extras[-1]["cluster_of"].max() == count - 1,
    )


def cluster_models(method: Any, server: Any) -> list[Any]:
    """Each cluster's parameters and statistics."""
    banks = [server["models"], server["statistics"]]
    return [
        {**server["shared"], **tree.take(banks[0], j), **tree.take(banks[1], j)}
        for j in range(method.clusters)
    ]


def ifca(s: plain.Setting, method: Any) -> plain.Result:
    net, shared = make_world("norm" if method.layers is None else "")[0], ()
    if method.layers == 1:
        shared = ("conv", "fc")
    first = make_initial_state(method, net, 10, CPU).server
    return groups.ifca(s, cluster_models(method, first), shared)


def clusters(report: RoundReport) -> Any:
    shares = [report.outcome.metrics[f"cluster_{j + 1}"] for j in range(report.method.clusters)]
    return {
        "shares": torch.tensor(shares),
        "models": cluster_models(report.method, report.state.server),
    }


add(
    ifca,
    {"ifca-three-norm": m.IFCA(clusters=3), "ifca-shared": m.IFCA(clusters=3, layers=1)},
    extras=clusters,
    margin=1e-5,
    check=lambda want: any(own["shares"].max() < 1 for own in want.extras),
)


def affinities(report: RoundReport) -> Any:
    return {"affinity": report.state.clients["affinity"]}


def relations(report: RoundReport) -> Any:
    """Who never took part has no p yet."""
    took_part = report.state.rows.take("facts", range(10))["participated"]
    p = torch.where(took_part[:, None], report.state.clients["p"], report.state.server["shares"])
    return {"cores": report.state.server["cores"], "p": p}


# At a sigma of the order of these networks' squared distances
CLOUD = m.FedAMP(sigma=0.3, start_from="cloud", pool="last_round", pull=0.5)
add(groups.fedamp, {"fedamp-norm": CLOUD})
add(groups.fedamp, {"heurfedamp": m.FedAMP("heurfedamp", sigma=20.0, share=0.8, pull=1.0)})
KEPT = m.FedFomo(9, fallback="keep", pool="all")
add(
    groups.fedfomo,
    {"fedfomo": m.FedFomo(candidates=9), "fedfomo-norm": KEPT},
    "held",
    cohorts=[*COHORTS, [0, 1, 2, 5, 8]],  # the third time for some
    extras=affinities,
    looser=(1e-4, 1e-3),
    margin=1e-5,
    check=lambda want: bool((want.extras[-1]["affinity"] < 0).any()),
)
COSINE = m.APPLE(rate=2.0, mu=1.0, schedule="cosine", until=2.0)
APPLE = {"apple": m.APPLE(rate=0.5, mu=2.0, until=0.6), "apple-cosine-norm": COSINE}
add(partial(groups.apple, rounds=3), APPLE, extras=relations)

# Low-rank adapters


def is_own_b(name: str) -> bool:
    return name.endswith("lora_B") or name.startswith("classifier.")


def is_b(name: str) -> bool:
    return name.endswith("lora_B")


def drawn_pairs(t: int, i: int) -> Any:
    """What FedALT draws for a client in a round, by the engine's generator."""
    params = tiny(pairs=2).params
    server = {"drawn": plain.pick(params, lambda name: name.endswith(".lora_A"))}
    return m.FedALT("own").sample(server, Draws(SEED, "train", t).server(i))["drawn"]


add(lambda s, a: models.by_name(s, is_own_b), {"fedsa_lora": m.FedSALoRA()}, "lora1")
add(lambda s, a: models.by_name(s, is_moving=is_own_b), {"ffa_lora": m.FFALoRA()}, "lora1")
FROZEN = {"ffa_lora-frozen": m.FFALoRA("frozen")}
add(lambda s, a: models.by_name(s, is_moving=is_b), FROZEN, "lora1")
add(lambda s, a: models.fedalt(s), {"fedalt": m.FedALT()}, "lora2")
add(lambda s, a: models.fedalt(s, drawn_pairs), {"fedalt-own": m.FedALT("own")}, "lora2")
add(lambda s, a: models.sdflora(s), {"sdflora": m.SDFLoRA(0.5)}, "lora1")


def drawn_factors(t: int, i: int) -> Any:
    """What FLoRA draws for a client in a round, by the engine's generator."""
    server = {"model": tiny(pairs=1).params}
    return m.FLoRA().sample(server, Draws(SEED, "train", t).server(i))["drawn"]


def model_and_residue(report: RoundReport) -> Any:
    return {**report.state.server["model"], **report.state.server["residue"]}


RANKED: dict[str, Any] = {
    "flexlora": (models.flexlora, m.FlexLoRA()),
    "raflora": (models.raflora, m.RaFLoRA()),
    "flora": (partial(models.flora, drawn=drawn_factors), m.FLoRA()),
    "fedex_lora": (models.fedex_lora, m.FedExLoRA()),
}
HETLORA = {"hetlora": m.HetLoRA(), "hetlora-pruning": m.HetLoRA(gamma=0.5, lam=0.3)}


def ranks_left(report: RoundReport) -> Any:
    ranks = report.state.server["ranks"]
    return {"left": torch.minimum(ranks, report.state.clients.get("rank", ranks))}


add(lambda s, a: models.hetlora(s, RANKS, a), HETLORA, "lora1 ranks", extras=ranks_left)
for name, (loops, method) in RANKED.items():
    words = "lora1 ranks residue" if method.has_residue else "lora1 ranks"
    play = lambda s, a, loops=loops: loops(s, RANKS)  # noqa: E731
    add(play, {name: method}, words, shared=model_and_residue)

# Features and heads


def prototypes(report: RoundReport) -> Any:
    there = {
        str(c): row
        for c, row in enumerate(report.state.server["mean"])
        if report.state.server["seen"][c]
    }
    return {"mean": there, "seen": report.state.server["seen"]}


add(
    partial(heads.fedas, order=draw_order(stream="align")),
    {
        "fedas-norm": m.FedAS(align_lr=0.01),
        "fedas-init": m.FedAS(align_lr=0.1, align_epochs=2, first="init", judge="received"),
        "fedas-means": m.FedAS(align_lr=0.1, first="global", align="means", weights="samples"),
    },
)
add(heads.fedrod, {"fedrod": m.FedRoD(gamma=0.5)})
add(heads.flute, {"flute-norm": m.FLUTE()}, tolerance=(1e-5, 1e-4))
FEDPAC = {"fedpac-two": m.FedPAC(5.0, 2, 1, 0.02), "fedpac-norm": m.FedPAC()}
add(heads.fedpac, FEDPAC, tolerance=(1e-5, 1e-4), margin=1e-5)
add(
    heads.fedproto,
    {
        "fedproto-nearest": m.FedProto(),
        "fedproto-nearest_own": m.FedProto(5.0, "all_epochs", "counts", "nearest_own"),
        "fedproto-head-norm": m.FedProto(3.0, "final", "uniform", "head"),
    },
    extras=prototypes,
)


def draw_noise(t: int, i: int, epoch: int) -> Tensor:
    """A pair of numbers for each feature, whose difference is logistic: all that a softmax of two
    sees of noise.
    """
    bank = torch.rand(2, BANK, 12, generator=Draws(SEED, "train", t).server(i))
    one, other = (BANK * draw_randoms(t, i, epoch, m.FedCP().randoms)).long().unbind(1)
    uniform = ((bank[0, one] + bank[1, other]) % 1).clamp(1e-6, 1 - 1e-6)
    return torch.stack([torch.log(uniform), torch.log(1 - uniform)], 1)


def fedcp(s: plain.Setting, method: Any) -> plain.Result:
    noise = draw_noise if method.policy_noise == "train" else None
    return heads.fedcp(s, method, first_server(method)["policy"], noise)


def fedcp_server(report: RoundReport) -> Any:
    server = report.state.server
    return {**server, "body": {**server["body"], **report.state.server_buffers["main"]}}


def client_heads(report: RoundReport) -> list[Any]:
    return [tree.take(report.state.clients["head"], i) for i in EVERYONE]


add(  # kernels of distances by another formula
    fedcp,
    {"fedcp-norm": m.FedCP(), "fedcp-off": m.FedCP(lam=0.3, policy_noise="off")},
    tolerance=(2e-5, 1e-4),
    shared=fedcp_server,
    extras=lambda report: {"own": client_heads(report)},
    evaluated="logits",
    looser=(1e-4, 1e-4),
)


def gpfl_extra(server: Any) -> Any:
    return tree.select(server, ("embeddings", "valve"))


def gpfl_server(report: RoundReport) -> Any:
    return {"model": shared_model(report), "extra": gpfl_extra(report.state.server)}


add(  # a layer normalisation and cosines divide by small numbers
    lambda s, a: heads.gpfl(s, a, gpfl_extra(first_server(a))),
    {"gpfl-frobenius": m.GPFL(), "gpfl-mean-norm": m.GPFL(0.3, 0.0, "mean")},
    tolerance=(2e-5, 1e-4),
    shared=gpfl_server,
    extras=lambda report: {"head": client_heads(report)},
    evaluated="logits",
)


def biases(report: RoundReport) -> Any:
    (mean,), (u,) = report.state.server["mean"].values(), report.state.clients["u"].values()
    return {"mean": mean, "u": u}


add(
    partial(heads.feddbe, first=draw_order("gather")),
    {
        "feddbe": m.FedDBE(kappa=20.0, rho=0.3, bias_lr=0.5),
        "feddbe-data": m.FedDBE(kappa=20.0, rho=0.6, bias_lr=0.1, mean="data"),
    },
    extras=biases,
    evaluated="logits",
)


def fedgen(s: plain.Setting, method: Any) -> plain.Result:
    def drawn(t: int, labels: list[int]) -> Any:
        shape = method.steps, method.batch, 1 + method.noise
        for own in torch.rand(*shape, generator=generator(SEED, "aggregate", t)):
            yield torch.tensor(labels)[(len(labels) * own[:, 0]).long()], own[:, 1:]

    def random(t: int, i: int, epoch: int) -> Tensor:
        return draw_randoms(t, i, epoch, 2 * method.noise + 1)

    return heads.fedgen(s, first_server(method)["generator"], method, random, drawn)


TAUGHT = {"noise": 6, "hidden": 9, "steps": 4, "batch": 8, "lr": 0.02}
add(  # Adam divides small gradients by their size, which amplifies rounding
    fedgen,
    {
        "fedgen": m.FedGen(3.0, teacher="mean_logits", labels="frequency", decay=0.5, **TAUGHT),
        "fedgen-other": m.FedGen(2e-4, beta=0.0, decay=0.3, weight_decay=0.1, **TAUGHT),
    },
    shared=lambda report: {**report.state.server["body"], **report.state.server["head"]},
    extras=lambda report: {"generator": report.state.server["generator"]},
    looser=(2e-5, 1e-4),
)


def floco(s: plain.Setting, method: Any) -> plain.Result:
    def random(purpose: str) -> Any:
        numbers = method.endpoints + 1
        return lambda t, i, epoch, steps: Draws(SEED, purpose, t).random(
            i, "main", epoch, steps, numbers
        )

    ends = first_server(method)["endpoints"][plain.HEAD[0]]
    return heads.floco(s, method, ends, random, draw_order("gather"))


add(  # centres come from the singular vectors of 10 clients' small differences
    floco,
    {
        "floco-wide": m.Floco(endpoints=4, tau=2, rho=0.5),
        "floco-plus": m.FlocoPlus(endpoints=3, tau=1, pers_epochs=2, lam=0.7),
        "floco-cold": m.FlocoPlus(endpoints=3, tau=2, pers_epochs=1, cold_start="global"),
    },
    shared=lambda report: {**report.state.server["shared"], **report.state.server["endpoints"]},
)


def pfedfda_server(report: RoundReport) -> Any:
    cov = unpack_symmetric(report.state.server["cov"])
    return {"body": shared_model(report), "mean": report.state.server["mean"], "cov": cov}


add(  # the search for beta stops where its steps are that small
    lambda s, a: heads.pfedfda(s, first_server(a)["mean"]),
    {"pfedfda-norm": m.PFedFDA()},
    cohorts=COHORTS[:2],  # as each search takes long
    tolerance=(1e-4, 1e-4),
    shared=pfedfda_server,
    evaluated="logits",
    looser=(1e-3, 1e-3),
)

# Networks of different kinds


def shuffled(method: Any) -> Any:
    """The server's orders of prototypes, drawn as the engine does."""

    def orders(t: int, count: int) -> Any:
        drawn = generator(SEED, "aggregate", t)
        for _ in range(method.server_epochs):
            yield torch.randperm(count, generator=drawn).tolist()

    return orders


SERVED = {"server_epochs": 3, "server_batch": 4, "server_lr": 0.05}
add(
    lambda s, a: kinds.fedgh(s, a, shuffled(a)),
    {"fedgh": m.FedGH(server_lr=0.1), "fedgh-batches-norm": m.FedGH(**SERVED)},
    shared=lambda report: report.state.server,
)
add(
    lambda s, a: kinds.fedtgp(s, a, shuffled(a), first_server(a)["maker"]),
    {"fedtgp": m.FedTGP(3.0, **SERVED), "fedtgp-tau-norm": m.FedTGP(1.0, tau=0.2, **SERVED)},
    extras=lambda report: {"mean": report.state.server["mean"]},
)
add(
    kinds.fd,
    {"fd": m.FD(0.7), "fd-logits-norm": m.FD(0.1, "logits", "all"), "fd-all": m.FD(teacher="all")},
    extras=lambda report: {key: report.state.server[key] for key in ("sum", "count")},
)


def common(report: RoundReport) -> Any:
    return report.state.server["common"]


def initial_client(method: Any) -> Any:
    net = make_world("")[0]
    return method.init(net.params, net.parts)[1]


COMMON = make_world("")[0].parts.common
add(
    lambda s, a: kinds.fml(s, a, COMMON),
    {"fml": m.FML(0.3, 0.6), "fml-norm": m.FML()},
    shared=common,
)
add(
    lambda s, a: kinds.fedmrl(s, a, COMMON, initial_client(a)["projector"]),
    {"fedmrl-norm": m.FedMRL()},
    shared=lambda report: {**common(report)["body"], **common(report)["head"]},
    evaluated="logits",
)
add(
    lambda s, a: kinds.fedkd(s, a, COMMON, initial_client(a)["map"], 3),
    {"fedkd": m.FedKD(0.5, 0.9), "fedkd-parameters-norm": m.FedKD(compress="parameters")},
    shared=common,
    margin=1e-5,
)
add(
    lambda s, a: plain.split(s, lambda name: name.startswith("norm.running")),
    {"fedavg_by_kind": m.FedAvgByKind()},
    shared=lambda report: tree.unravel(report.state.server["models"][0], make_world("")[0].params),
)

# Entries of one's own

SEVERAL = (0.3, 0.7, 0.9, 0.98)


def choices(report: RoundReport) -> Any:
    shares = [report.outcome.metrics[f"q_share/{q}"] for q in SEVERAL]
    return {"q": report.state.clients["q"][report.cohort], "shares": torch.tensor(shares)}


add(
    masks.fedobp,
    {
        "fedobp": m.FedOBP(q=0.9),
        "fedobp-published": m.FedOBP(q=0.9, score="obp_as_published", ema=0.3),
        "fedobp-classifier": m.FedOBP(q=0.5, classifier_only=True, scope="tensor"),
        "fedobp-gradient": m.FedOBP(q=0.5, score="gradient", scope="tensor", cold_start="initial"),
    },
    cohorts=LONGER,
    margin=1e-5,
    extras=lambda report: {"own": report.state.clients["model"]},
)
add(
    masks.fedobp_choosing,
    {"fedobp_adaptive": m.FedOBPAdaptive(q=SEVERAL)},
    "held",  # three clients are too small to hold anything out
    cohorts=[*COHORTS, [0, 4, 6], [2, 4, 6]],
    extras=choices,
    margin=1e-5,
    check=lambda want: {q for own in want.extras for q in own["q"].tolist()} == {*SEVERAL},
)
PERSONAL = draw_order(stream="personal")
PHASES = {"feddpa-phases": m.FedDPA(0.05, lam1=0.5, lam2=0.3, clip=0.2)}
add(partial(masks.feddpa, order=PERSONAL), PHASES, margin=1e-6)
add(
    partial(masks.fedselect, order=PERSONAL),
    {
        "fedselect-all": m.FedSelect(p=0.3, scope="all", lr_v=0.02, lr_u=0.08),
        "fedselect-window": m.FedSelect(p=0.4, delta="window", every=1),
        "fedselect-least": m.FedSelect(personalise="least", p=0.4, lr_u=0.08),
    },
    cohorts=LONGER,
    margin=1e-7,
)
PSPFL = {"pspfl-norm": m.PSPFL(0.5), "pspfl-all": m.PSPFL(0.7, "all")}
add(masks.pspfl, PSPFL, cohorts=LONGER, margin=1e-5)
add(
    partial(masks.seqfededt, turns=draw_turns),
    {
        "seqfededt-norm": m.SeqFedEDT("squared", 0.9),
        "seqfededt-importance": m.SeqFedEDT("importance", 0.3),
        "seqfededt-difference": m.SeqFedEDT("difference", 0.5, classifier_only=True),
    },
    margin=1e-6,
)


def critical(report: RoundReport) -> Any:
    rows = [leaf[report.cohort].flatten(1).sum(1) for leaf in report.state.clients["mask"].values()]
    return {"partners": report.state.clients["partners"][report.cohort], "counts": sum(rows)}


def differ_in_partners(want: plain.Result) -> bool:
    return len({n for own in want.extras for n in own["partners"].tolist()}) > 1


DELTA = m.FedPURIN(tau=0.7, beta=3, score="delta", judge="dense")
HESSIAN = m.FedPURIN(tau=0.2, hessian=True, include_norm=True, cutoff=-1.0)
PURIN = {"fedpurin-hessian": HESSIAN, "fedcac": m.FedCAC(beta=6), "fedpurin-delta": DELTA}
CRITICAL = {"extras": critical, "margin": 1e-5, "check": differ_in_partners}
add(masks.fedpurin, PURIN, cohorts=LONGER, **CRITICAL)
add(masks.fedpurin, {"fedpurin-delta-norm": DELTA}, **CRITICAL)

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


def leading(channels: int, units: int) -> Sets:
    return list(range(channels)), list(range(units))


def first(share: float) -> Sets:
    return leading(math.ceil(share * 4 - 1e-9), math.ceil(share * 12 - 1e-9))


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


SETS = {  # by round and client
    "prefix": lambda t, i: leading(*sizes(i)),
    "fixed": lambda t, i: first(width(t, i)),
    "rolled": rolled,
    "drawn": lambda t, i: drawn_by_lot(t, i, sizes(i)),
    "drawn first": lambda t, i: first(drawn_width(t, i)),
}


def pruned(score: str, begin: str) -> Loops:
    def loops(s: plain.Setting, method: Any) -> plain.Result:
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

    return loops


def heterofl(sets: str, rate: Any = width, untrained: str = "fixed") -> Loops:
    return lambda s, a: submodels.heterofl(s, a, SETS[sets], rate, SETS[untrained])


def played(sets: str, untrained: str = "") -> Loops:
    before = untrained and (lambda i: SETS[untrained](1, i))
    return lambda s, a: submodels.play_small(s, SETS[sets], untrained=before)


RANKED = {"widths": WIDTHS, "ranking_lr": 0.05}
add(lambda s, a: submodels.fedspu(s, SETS["drawn"]), {"fedspu-norm": m.FedSPU(WIDTHS)})
# Whose statistics are averaged at the server
add(played("drawn"), {"random_dropout": m.RandomDropout(WIDTHS, judge="own")})
add(played("prefix", "prefix"), {"fjord-norm": m.FjORD(WIDTHS)})
add(pruned("l2", "initial"), {"hermes-norm": m.Hermes(**RANKED)})
add(pruned("l1", "current"), {"fedmp-norm": m.FedMP(first="current", **RANKED)})
add(pruned("gradient", "initial"), {"prunefl-norm": m.PruneFL(**RANKED)})
SCALED = m.HeteroFL(WIDTHS, scaler=True)
add(heterofl("fixed"), {"heterofl-scaler": SCALED, "heterofl-norm": m.HeteroFL(WIDTHS)})
ANY = m.HeteroFL(WIDTHS, dynamic=True, scaler=True, weighting="samples", masked=False)
add(heterofl("drawn first", drawn_width), {"heterofl-drawn-norm": ANY})
add(heterofl("rolled", untrained="rolled"), {"fedrolex-norm": m.FedRolex(WIDTHS, scaler=True)})


def sent_level(t: int, i: int) -> int:
    return int(torch.randint(3, (), generator=Draws(SEED, "train", t).server(i)))


def flexfl(s: plain.Setting, method: Any) -> plain.Result:
    def device(i: int) -> int:
        """Four weak, three medium, three strong; or all of them strong."""
        return 2 if method.devices == (0, 0, 1) else (0 if i < 4 else 1 if i < 7 else 2)

    levels = submodels.flexfl_levels(s, method.apoz or (0.0, 0.0), (0.25, 0.5, 1.0), 0.05)
    sent = {sent_level(t, i) for t, cohort in enumerate(s.cohorts, 1) for i in cohort if i != 9}
    assert sent == {0, 1, 2}  # and strong devices train all; client 9 has one sample
    return submodels.flexfl(s, levels, sent_level, device, method)


RETURNING = [[0, 2, 3, 5, 9], [1, 2, 4, 6, 9], [2, 4, 5, 6, 9]]


def subflot(s: plain.Setting, method: Any) -> plain.Result:
    def rate(i: int) -> float:
        return RATES[i * 4 // 10]

    def first_choice(t: int, i: int) -> Sets:
        counts = round(4 * (1 - rate(i))), round(12 * (1 - rate(i)))
        return drawn_by_lot(t, i, counts) if method.initial == "random" else leading(*counts)

    return submodels.subflot(s, first_choice, rate, method)


STRONG = m.FlexFL(apoz=(0.2, 0.7), gamma=4.0, temperature=1.5, devices=(0, 0, 1))
add(flexfl, {"flexfl": m.FlexFL(gamma=10.0, temperature=3.0), "flexfl-norm": STRONG})
GIVEN = {"rates": RATES, "assign": "blocks", "positions": "first"}
SUBFLOT = {
    "one": m.SubFLOT(alpha=0.5, lam=1.0, **GIVEN),
    "balanced": m.SubFLOT(mode="balanced", alpha=0.3, lam=0.5, **GIVEN),
    "prefix": m.SubFLOT(alpha=0.8, lam=0.0, initial="prefix", **GIVEN),
    "no-extraction": m.SubFLOT(alpha=0.5, lam=1.0, otp=False, **GIVEN),
    "no-aggregation": m.SubFLOT(alpha=0.5, lam=1.0, ota=False, **GIVEN),
}
for name, method in SUBFLOT.items():
    add(
        subflot,
        {f"subflot-{name}": method},
        "norm alike",  # and they learn fast, or all would be found where they began
        cohorts=RETURNING,
        local=dataclasses.replace(LOCAL, lr=0.3),
        check=lambda want, name=name: any(want.counts) or name == "prefix",
        rounds=0,
    )

NAMES = """
hetlora fedphp fedala-0 ifca-three-norm lg_fedavg-published pfedme-norm pfedhn-clipped fedpac-norm fedcp-off
fedpurin-delta-norm heterofl-scaler fedfomo-norm ffa_lora fedalt seqfededt-difference flexfl
fd-all subflot-balanced subflot-no-extraction subflot-no-aggregation feddyn pspfl-norm cfl-single feddbe
"""
LEFT_TO_TEST_ALL = set(NAMES.split())
"""Whose settings others try too; what is left has each setting of a method once."""
