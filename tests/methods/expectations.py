"""What every method promises besides its formula, a row a method: what travels, limits, statistics,
evaluation, ranges.

tests/methods/test_expectations.py and tests/engine/test_contract.py ask each row. Numbers are
counted by hand: scalars of the network Tiny, on the federation of fedpfl/testing/toy.py, whose two
rounds are played by clients 0, 2, 3, 5 and then by 0, 1, 4, 5. Client 5 has one sample, and makes
no step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedpfl.methods import Ditto, FedAvg, FedBABU, FedBN, FedOBP, FedPer, FedRep, LocalOnly, Method

COHORT, CLIENTS, RETURNING = 4, 6, 2  # clients 0 and 5 play both rounds
NEVER_TRAINED = 1  # in the first one
CLASSES, FEATURES = 5, 12
HEAD = CLASSES * FEATURES + CLASSES
BODY = 484
SIZE = BODY + HEAD
NEURONS = 4 + 12
LORA_A, LORA_B = 2 * (9 + 36), 2 * (4 + 12)  # of rank 2, in conv and fc
PROTOTYPES = CLASSES * FEATURES
# Of 4 numbers of noise and 8 hidden neurons
GENERATOR = (4 + CLASSES + 1) * 8 + 4 * 8 + (8 + 1) * FEATURES
POLICY = 2 * FEATURES * FEATURES + 6 * FEATURES
VALVE = 2 * (FEATURES * FEATURES + 3 * FEATURES)
WEIGHTS = 36 + 432 + 60  # what FedSelect chooses among


def small_network(channels: int, units: int) -> int:
    """Count the scalars between so many of Tiny's 4 channels and 12 units."""
    return 10 * channels + (9 * channels + 1) * units + CLASSES * units + CLASSES


FIFTH, TWO_FIFTHS, THREE_FIFTHS = small_network(1, 2), small_network(1, 4), small_network(2, 7)
FOUR_FIFTHS, HALF, QUARTER = small_network(3, 9), small_network(2, 6), small_network(1, 3)
EIGHTH, SIXTEENTH = small_network(1, 2), small_network(1, 1)
FIVE_WIDTHS = (
    FIFTH + TWO_FIFTHS + THREE_FIFTHS + SIZE,  # clients 0, 2, 3, 5
    FIFTH + FIFTH + FOUR_FIFTHS + SIZE,  # clients 0, 1, 4, 5
)
THREE_WIDTHS = (QUARTER + 2 * THREE_FIFTHS + SIZE, 2 * QUARTER + 2 * SIZE)
FALLING_WIDTHS = (SIZE + HALF + QUARTER + SIXTEENTH, 2 * SIZE + EIGHTH + SIXTEENTH)
PRUNED_DOWN = (COHORT * SIZE, FIFTH + 3 * SIZE)  # who comes for the first time receives everything

Rounds = int | tuple[int, int]
"""Scalars (or bits) in each of the two rounds over the whole cohort; one number is that of each
client.
"""

ModelPlace = Callable[[Any], Any]


def over_the_cohort(expected: Rounds) -> list[int]:
    return [COHORT * expected] * 2 if isinstance(expected, int) else list(expected)


def whole_server(server: Any) -> Any:
    return server


def server_model(server: Any) -> Any:
    return server["model"]


def server_body(server: Any) -> Any:
    return server["body"]


def body_and_head(server: Any) -> Any:
    return {**server["body"], **server["head"]}


@dataclass(frozen=True)
class Limit:
    """Hyperparameters at which a method is another one, bit for bit.

    model: where the server has the other's model; None: it has none.
    evaluated: who is also evaluated as by the other: `everyone` between rounds, or the `cohort` in
    its round alone.
    first_round_only: whether it holds in the first round alone.
    clients: `ragged`, `equal` in size, or a `single` one.
    atol: above 0 where rounding differs, on both backends; `batched_atol`: on the batched one.
    """

    values: Mapping[str, Any]
    other: Method
    model: ModelPlace | None = whole_server
    evaluated: Literal["everyone", "cohort", "nobody"] = "everyone"
    first_round_only: bool = False
    clients: Literal["ragged", "equal", "single"] = "ragged"
    atol: float = 0.0
    batched_atol: float = 0.0


FEDAVG, LOCAL_STATISTICS = FedAvg(), FedAvg(statistics="local")


def fedavg_at(model: ModelPlace | None = whole_server, **values: Any) -> Limit:
    return Limit(values, FEDAVG, model)


def local_only_at(**values: Any) -> Limit:
    return Limit(values, LocalOnly(), None)


def first_round_of(other: Method, model: ModelPlace | None = whole_server, **values: Any) -> Limit:
    return Limit(values, other, model, evaluated="nobody", first_round_only=True)


@dataclass(frozen=True)
class Expect:
    """Hold what is expected of a method.

    down, up: scalars that travel; None where a draw decides (the method's own test counts them).
    down_bits, up_bits: bits beside those of the scalars.
    statistics: where each network's BatchNorm statistics stay, by role or of all.
    judged: whether the cohort is evaluated by what it `trained`, by what it would now start from
        (`latest`), by what it `kept` (which is both), or by what evaluation finds `anew`.
    first_time: by what a client that never trained is evaluated, with the hyperparameters at which
    it is so.
    private: entries of the client's state that change whenever it trains, and never else.
    """

    down: Rounds | None = SIZE
    up: Rounds | None = SIZE
    down_bits: Rounds = 0
    up_bits: Rounds = 0
    limits: tuple[Limit, ...] = ()
    statistics: str | Mapping[str, str] = "server"
    judged: Literal["trained", "latest", "kept", "anew"] = "latest"
    first_time: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    private: tuple[str, ...] = ()

    def judged_by(self, method: Method) -> str:
        return "trained" if getattr(method, "judge", None) == "stored" else self.judged


GLOBAL: Mapping[str, Mapping[str, Any]] = {"global": {}}
INITIAL: Mapping[str, Mapping[str, Any]] = {"initial": {}}
INITIAL_HEAD: Mapping[str, Mapping[str, Any]] = {"initial head": {}}


def whole_at(clients: Any = "ragged", **values: Any) -> Limit:
    """Return where a method whose clients train parts of the network trains all of it."""
    return Limit(values, LOCAL_STATISTICS, server_model, "cohort", clients=clients)


def server_at(other: Method, model: ModelPlace | None = server_model, **values: Any) -> Limit:
    """Return where clients of one size make the server's model another method's."""
    return Limit(values, other, model, "nobody", clients="equal")


def alone_at(other: Method, **values: Any) -> Limit:
    """Return where the only client of a federation has another method's model."""
    return Limit(values, other, None, clients="single")


def nearly(limit: Limit) -> Limit:
    """Return the same where the batched backend rounds otherwise."""
    return replace(limit, batched_atol=1e-6)


def own_models(**values: Any) -> Expect:
    """Return what is expected of a method whose clients are evaluated by models of their own."""
    kept: dict[str, Any] = {"statistics": "client", "judged": "trained", "first_time": INITIAL}
    return Expect(**{**kept, **values})


FULL_WIDTH = whole_at(widths=(1.0,))
UNSCALED = {"widths": (1.0,), "scaler": False, "masked": False}
PRUNING = own_models(
    down=PRUNED_DOWN,
    up=FIVE_WIDTHS,
    up_bits=(COHORT * NEURONS, 2 * NEURONS),
    limits=(whole_at(widths=(1.0,), first="current"),),
)


class Expectations(dict[str, Expect]):
    """Rows by method, as complete as METHODS."""

    def __missing__(self, name: str) -> Expect:
        raise AssertionError(f"give {name} a row in tests/methods/expectations.py")


EXPECTED = Expectations()
EXPECTED |= {
    "apfl": Expect(
        limits=(
            local_only_at(alpha=1.0, adaptive=False),
            local_only_at(alpha=1.0, adaptive=False, mixing="param"),
            fedavg_at(alpha=0.0, adaptive=False),
        ),
        statistics={"w": "server", "v": "client"},
        private=("v", "alpha"),
    ),
    "apple": Expect(
        down=SIZE * (CLIENTS - 1),
        # All tell once how many samples they have.
        up=(COHORT * (SIZE + 1) + CLIENTS, COHORT * (SIZE + 1)),
        statistics="client",
    ),
    "centralized": Expect(
        down=0, up=0, limits=(alone_at(FEDAVG), alone_at(LocalOnly())), first_time=GLOBAL
    ),
    "cfl": Expect(
        limits=(
            fedavg_at(None, eps1=0.0, statistics="aggregate"),
            Limit({"eps1": 0.0}, LOCAL_STATISTICS, None),
        ),
        statistics="client",
    ),
    "ditto": Expect(
        limits=(
            local_only_at(lam=0.0),
            Limit({"personal_epochs": 4}, FEDAVG, evaluated="nobody"),
        ),
        statistics={"w": "server", "v": "client"},
        first_time={"initial": {}, "global": {"cold_start": "global"}},
        private=("v",),
    ),
    "fedadam": Expect(first_time=GLOBAL),
    "fedala": Expect(
        limits=(fedavg_at(eta=0.0), fedavg_at(eta=0.0, layers=3)),
        judged="anew",
        first_time=GLOBAL,
    ),
    "fedalt": Expect(
        down=(0, COHORT * (LORA_A + LORA_B)),  # what others trained, once there is any
        up=LORA_A + LORA_B,
        statistics="client",
        private=("model",),
    ),
    "fedamp": own_models(
        down=(0, RETURNING * SIZE),
        limits=(local_only_at(pull=0.0), local_only_at(variant="heurfedamp", pull=0.0)),
        private=("model",),
    ),
    "fedas": Expect(
        down=BODY,
        up=BODY + 1,
        limits=(
            Limit(
                {"align_epochs": 0, "weights": "samples", "judge": "received"},
                FedPer(statistics="local"),
            ),
        ),
        statistics="client",
        first_time={"initial": {}, "initial head": {"judge": "received"}},
    ),
    "fedavg": Expect(first_time=GLOBAL),
    "fedavgm": Expect(
        limits=(Limit({"momentum": 0.0}, FEDAVG, server_model, atol=1e-5),), first_time=GLOBAL
    ),
    "fedbabu": Expect(down=BODY, up=BODY, first_time=INITIAL_HEAD),
    "fedbn": Expect(statistics="client", first_time=GLOBAL),
    "fedcac": own_models(
        up_bits=SIZE,
        limits=(
            server_at(LOCAL_STATISTICS, tau=1.0, cutoff=-1.0),
            Limit({"tau": 0.0}, LOCAL_STATISTICS, server_model, "nobody"),
        ),
    ),
    "fedcp": Expect(down=SIZE + POLICY, up=SIZE + POLICY, private=("head",)),
    "feddbe": Expect(
        # Before the first round all receive the initial model, and answer with a mean and a number
        # of samples.
        down=(CLIENTS * SIZE + COHORT * (SIZE + FEATURES), COHORT * SIZE + RETURNING * FEATURES),
        up=(CLIENTS * (FEATURES + 1) + COHORT * SIZE, COHORT * SIZE),
        limits=(fedavg_at(server_model, kappa=0.0, bias_lr=0.0),),
        private=("u",),
    ),
    "feddpa": Expect(
        limits=(
            fedavg_at(threshold=1.0, rule="quantile", train="joint"),
            fedavg_at(threshold=1.0, rule="value", train="joint"),
            fedavg_at(threshold=1.0, lam2=0.0),
            Limit(
                {"threshold": 0.4, "rule": "quantile", "train": "joint"},
                FedOBP(q=0.4, score="fisher", scope="tensor", cold_start="global"),
            ),
        ),
        first_time=GLOBAL,
    ),
    "feddyn": Expect(first_time=GLOBAL, private=("dual",)),
    "fedfomo": own_models(
        down=(0, RETURNING * 3 * SIZE),  # the three others that trained in the last round
        up=SIZE + 5,  # and a weight for the own model and each of four candidates
        limits=(local_only_at(candidates=0, fallback="keep"),),
    ),
    "fedgen": Expect(
        down=SIZE + GENERATOR + CLASSES,
        up=SIZE + CLASSES,
        limits=(fedavg_at(body_and_head, alpha=0.0, beta=0.0),),
        first_time=GLOBAL,
    ),
    "fedmp": PRUNING,
    "fedobp": Expect(
        # The entries above the 0.9-quantile stay with the client.
        down=(COHORT * SIZE, COHORT * (SIZE - 55)),
        down_bits=(0, COHORT * SIZE),
        limits=(
            fedavg_at(q=1.0, score="obp", norm="none"),
            fedavg_at(q=1.0, score="obp_as_published", norm="global"),
            fedavg_at(q=1.0, score="fisher", norm="layer"),
            fedavg_at(q=1.0, scope="tensor"),
            fedavg_at(q=1.0, classifier_only=True),
            fedavg_at(q=1.0, ema=0.5),
            first_round_of(FEDAVG, q=0.0),
            *(Limit({"q": q}, FEDAVG, clients="single") for q in (0.0, 0.5)),
        ),
        first_time={"global": {"cold_start": "global"}},
    ),
    "fedobp_adaptive": Expect(
        down=(COHORT * SIZE, COHORT * (SIZE - 6)),  # of the 0.99-quantile, the largest on the list
        down_bits=(0, COHORT * 6 * 32),  # in their place
        up_bits=2,
        limits=(Limit({"q": (0.9,)}, FedOBP(q=0.9)),),
    ),
    "fedpac": Expect(
        down=(COHORT * SIZE, COHORT * (SIZE + PROTOTYPES)),
        up=SIZE + 2 * PROTOTYPES + CLASSES + 1,
        limits=(
            Limit(
                {"lam": 0.0, "combine": False, "head_lr": None, "body_epochs": 1},
                FedRep(head_epochs=1, body_epochs=1),
                server_body,
            ),
        ),
        first_time=INITIAL_HEAD,
        private=("head",),
    ),
    "fedper": Expect(
        down=BODY,
        up=BODY,
        limits=(
            fedavg_at(layers=0),
            fedavg_at(layers=0, head_init="server_average"),
            Limit({"layers": 3, "statistics": "local"}, LocalOnly(), None),
            first_round_of(FEDAVG, head_init="server_average"),
            alone_at(FEDAVG),
        ),
        first_time={"initial head": {}, "global": {"head_init": "server_average"}},
        private=("head",),
    ),
    "fedphp": Expect(
        limits=(Limit({"lam": 0.0}, FEDAVG, server_model, evaluated="nobody"),),
        statistics={"w": "server", "q": "client"},
        first_time=GLOBAL,
    ),
    "fedproto": Expect(
        down=None,  # the prototypes that there are
        up=None,
        limits=(
            local_only_at(lam=0.0, judge="head"),
            local_only_at(lam=0.0, judge="head", prototypes="final"),
        ),
        statistics="client",
        first_time=INITIAL,
        private=("model",),
    ),
    "fedprox": Expect(limits=(fedavg_at(mu=0.0),), first_time=GLOBAL),
    "fedpurin": own_models(
        down=None,  # what is not zero
        up=None,
        limits=(
            nearly(server_at(FedBN(), tau=1.0, cutoff=-1.0, beta=1)),
            nearly(server_at(LOCAL_STATISTICS, tau=1.0, cutoff=-1.0, include_norm=True)),
        ),
    ),
    "fedrep": Expect(
        down=BODY,
        up=BODY,
        limits=(
            Limit({"head_epochs": 0, "body_epochs": 2}, FedBABU()),
            first_round_of(FedRep(), model=None, personal_init="server_average"),
        ),
        first_time={"initial head": {}, "global": {"personal_init": "server_average"}},
        private=("own",),
    ),
    "fedrod": Expect(limits=(Limit({"gamma": 0.0}, FEDAVG, evaluated="nobody"),), private=("q",)),
    "fedrolex": own_models(
        down=THREE_WIDTHS,
        up=THREE_WIDTHS,
        up_bits=CLASSES,
        limits=(whole_at(**UNSCALED),),
        first_time={},
    ),
    "fedsa_lora": Expect(
        down=LORA_A,
        up=LORA_A,
        limits=(alone_at(FEDAVG), alone_at(FEDAVG, head="averaged")),
        private=("own",),
    ),
    "fedselect": own_models(
        down=(COHORT * SIZE, COHORT * SIZE - RETURNING * WEIGHTS // 2),
        up=(COHORT * SIZE, COHORT * SIZE - RETURNING * WEIGHTS // 2),
        # A mask goes up when it is another: at 1/2 it no longer grows.
        up_bits=(COHORT * WEIGHTS, 2 * WEIGHTS),
        limits=(
            server_at(LOCAL_STATISTICS, whole_server, alpha=0.0),
            server_at(LOCAL_STATISTICS, whole_server, alpha=0.0, delta="window", every=1),
        ),
    ),
    "fedspu": own_models(
        down=THREE_WIDTHS, up=THREE_WIDTHS, down_bits=NEURONS, limits=(FULL_WIDTH,)
    ),
    "fedyogi": Expect(first_time=GLOBAL),
    "ffa_lora": Expect(down=LORA_B + HEAD, up=LORA_B + HEAD),
    "fjord": own_models(
        down=FIVE_WIDTHS,
        up=FIVE_WIDTHS,
        limits=(FULL_WIDTH, whole_at(widths=(1.0,), ordered=True)),
        first_time={},
    ),
    "flexfl": own_models(
        down=None,  # levels are drawn
        up=None,
        limits=(whole_at(levels=(1.0,), devices=(1,)),),
        first_time={},
    ),
    "floco": Expect(
        down=SIZE + 9 * PROTOTYPES,  # ten endpoints of the head's weight
        up=SIZE + 9 * PROTOTYPES,
        limits=(fedavg_at(None, endpoints=1, tau=1),),
    ),
    "floco_plus": Expect(
        # After the first round all train once more, from which each is given a place among three
        # endpoints.
        down=(
            COHORT * (SIZE + 2 * PROTOTYPES),
            CLIENTS * (SIZE + 2 * PROTOTYPES) + COHORT * (SIZE + 2 * PROTOTYPES + 3),
        ),
        up=(COHORT * (SIZE + 2 * PROTOTYPES), (CLIENTS + COHORT) * (SIZE + 2 * PROTOTYPES)),
        limits=(
            Limit({"endpoints": 1, "pers_epochs": 2, "lam": 0.7}, Ditto(lam=0.7), None, atol=1e-4),
        ),
        statistics={"main": "server", "v": "client"},
        private=("v",),
    ),
    "flute": Expect(
        down=BODY + PROTOTYPES,  # the server changes the head's weight
        up=SIZE,
        up_bits=CLASSES,
        limits=(
            Limit({"l1": 0.0, "l2": 0.0, "l3": 0.0, "server_lr": 0.0, "rep_epochs": 2}, FedPer()),
        ),
        first_time=INITIAL_HEAD,
    ),
    "gpfl": Expect(
        down=BODY + PROTOTYPES + VALVE,
        up=BODY + PROTOTYPES + VALVE,
        first_time=INITIAL_HEAD,
        private=("head",),
    ),
    "hermes": PRUNING,
    "heterofl": own_models(
        down=FALLING_WIDTHS,
        up=FALLING_WIDTHS,
        up_bits=CLASSES,
        limits=(
            whole_at(**UNSCALED, weighting="samples"),
            whole_at("equal", **UNSCALED),
            whole_at("equal", **{**UNSCALED, "scaler": True}),
        ),
        first_time={"initial": {"scaler": True}},  # client 1 holds everything
    ),
    "ifca": Expect(
        down=2 * SIZE, up_bits=2, limits=(fedavg_at(None, clusters=1),), statistics="client"
    ),
    "knn_per": Expect(
        limits=(
            fedavg_at(lam=0.0),
            fedavg_at(lam=1.0, capacity=0),
            fedavg_at(lam=0.0, mix="logits"),
        ),
        first_time=GLOBAL,
    ),
    "lg_fedavg": Expect(
        down=HEAD,
        up=HEAD,
        limits=(
            Limit({"layers": 3}, LOCAL_STATISTICS),
            Limit({"layers": 3, "variant": "as_published"}, LOCAL_STATISTICS),
            local_only_at(layers=0),
            local_only_at(layers=0, variant="as_published"),
        ),
        statistics="client",
        private=("own",),
    ),
    "local_only": Expect(
        down=0,
        up=0,
        limits=(alone_at(FEDAVG),),
        statistics="client",
        judged="kept",
        first_time=INITIAL,
        private=("model",),
    ),
    "moon": Expect(
        limits=(fedavg_at(mu=0.0),),
        statistics={"main": "server", "last": "client"},
        first_time=GLOBAL,
    ),
    "per_fedavg": Expect(first_time=GLOBAL),
    "pfedfda": Expect(
        down=BODY + PROTOTYPES + FEATURES * (FEATURES + 1) // 2,
        up=BODY + PROTOTYPES + FEATURES * (FEATURES + 1) // 2,
        limits=(Limit({"variant": "as_published"}, FEDAVG, body_and_head, evaluated="nobody"),),
        judged="anew",
    ),
    "pfedhn": Expect(statistics="client"),
    "pfedme": Expect(judged="anew", first_time=GLOBAL),
    "pfedsd": own_models(
        limits=(
            Limit({"lam": 0.0}, LOCAL_STATISTICS, evaluated="nobody"),
            alone_at(LocalOnly(), lam=0.0),
        ),
    ),
    "prunefl": replace(PRUNING),
    "pspfl": own_models(
        # Of clients 0 and 5 the latter, without a step, shares everything.
        down=(COHORT * SIZE, COHORT * SIZE - 274),
        up=(COHORT * SIZE, COHORT * SIZE - 274),
        down_bits=(0, SIZE),
        limits=(
            Limit({"q": 1.0}, LOCAL_STATISTICS, evaluated="nobody"),
            Limit({"q": 1.0, "upload": "all"}, LOCAL_STATISTICS, evaluated="nobody"),
            Limit(
                {"q": 0.9, "upload": "all"},
                FedOBP(
                    q=0.9, score="gradient", norm="none", cold_start="global", statistics="local"
                ),
                evaluated="nobody",
            ),
        ),
        first_time=GLOBAL,
        private=("score",),
    ),
    "random_dropout": Expect(
        down=THREE_WIDTHS,
        up=THREE_WIDTHS,
        down_bits=NEURONS,
        limits=(Limit({"widths": (1.0,)}, FEDAVG, server_model),),
        judged="anew",
        first_time=GLOBAL,
    ),
    "scaffold": Expect(down=2 * SIZE, up=2 * SIZE, first_time=GLOBAL, private=("control",)),
    "sdflora": Expect(
        down=(LORA_A + LORA_B) // 2,
        up=(LORA_A + LORA_B) // 2,
        limits=(
            Limit({"share": 1.0, "merge": "averaged", "head": "averaged"}, FEDAVG, None),
            Limit({"share": 0.0, "statistics": "local"}, LocalOnly(), None),
            alone_at(FEDAVG, share=0.5, merge="averaged"),
        ),
        private=("own",),
    ),
    "seqfededt": own_models(
        down=0,  # a hop is counted once
        limits=(
            alone_at(LocalOnly(), score="difference", q=0.9),
            alone_at(LocalOnly(), score="importance", q=0.0),
        ),
        first_time=GLOBAL,
    ),
    "subflot": own_models(
        down=None,  # rates are drawn
        up=None,
        limits=(
            whole_at(rates=(0.0,), alpha=1.0, mode="one"),
            whole_at(rates=(0.0,), alpha=1.0, mode="balanced"),
        ),
    ),
}

RANGES = """
must be 0 or more, or -1 | -0.5 | fedcac.cutoff
must be 0 or more, and not all 0 | (0, 0, 0) | flexfl.devices
must be 0 or more, got | (-1, 1, 1) | flexfl.devices
must be between 0 and 1 | (1.5,) | flexfl.apoz
must be 1 or more | 0 | prunefl.ranking_epochs
must be above 0 | 0.0 | fedpurin.tau pfedfda.eps
must be at least one share | () | fedmp.widths heterofl.widths
must be above 0 and at most 1 | (0.0,) | fedrolex.widths
must be one or more, ascending | (0.5, 0.25, 1.0) | flexfl.levels
must be one or more, ascending, got | () | fedobp_adaptive.q
must be one or more, ascending | (0.5, 0.5) | fedobp_adaptive.q
must be 0 with several q and score=obp | 0.3 | fedobp_adaptive.ema
must be none or global with several q | 'layer' | fedobp_adaptive.norm
must be as many numbers as levels | (1, 1) | flexfl.devices
must be 0 unless ordered | 0.5 | fjord.distill
must be below 2 / lam = 0.1333, or it diverges | 0.2 | pfedme.inner_lr pfedme.outer_lr
must be at least one rate | () | subflot.rates
must be at most 3, the network's layers, got 4$ | 4 | fedper.layers
the network has layers 0 to 2, got 3 | 3 | fedselect.personalise
must be one of most, least, random, conv, fc, classifier | 'fc2' | fedselect.personalise
has 3 numbers for 2 groups of neurons | (0.5, 0.5, 0.5) | flexfl.apoz
"""
"""How the refusal goes on after the key | a value out of range | method.key of each."""
