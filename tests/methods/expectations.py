"""What every method promises besides its formula, a row a method: what travels, limits, statistics,
evaluation, ranges.

tests/methods/test_expectations.py and tests/engine/test_contract.py ask each row. Numbers are
counted by hand: scalars of the network Tiny, on the federation of fedpfl/testing/toy.py, whose two
rounds are played by clients 0, 2, 3, 5 and then by 0, 1, 4, 5. Client 5 has one sample, and makes
no step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from fedpfl.methods import Method

COHORT, CLIENTS, RETURNING = 4, 6, 2  # clients 0 and 5 play both rounds
NEVER_TRAINED = 1  # in the first one
CLASSES, FEATURES = 5, 12
HEAD = CLASSES * FEATURES + CLASSES
BODY = 484
SIZE = BODY + HEAD
NEURONS = 4 + 12
LORA_A, LORA_B = 2 * (9 + 36), 2 * (4 + 12)  # of rank 2, in conv and fc
LORA = LORA_A + LORA_B
RESIDUE = 4 * 9 + 12 * 36
# Clients 0, 2, 3, 5 have ranks 1, 2, 1, 2, and 0, 1, 4, 5 ranks 1, 2, 2, 2
OWN_RANKS = (6 * LORA // 2 + COHORT * HEAD, 7 * LORA // 2 + COHORT * HEAD)
PROTOTYPES = CLASSES * FEATURES
COMMON = (64 + 1) * 8 + (8 + 1) * CLASSES
SIMPLEX = SIZE + 2 * PROTOTYPES
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


def over_the_cohort(expected: Rounds) -> list[int]:
    return [COHORT * expected] * 2 if isinstance(expected, int) else list(expected)


@dataclass(frozen=True)
class Expect:
    """Hold what is expected of a method.

    down, up: scalars that travel; None where a draw decides (the method's own test counts them), or
        for as many up as down.
    down_bits, up_bits: bits beside those of the scalars.
    statistics: where each network's BatchNorm statistics stay, by role or of all.
    judged: whether the cohort is evaluated by what it `trained`, by what it would now start from
        (`latest`), by what it `kept` (which is both), or by what evaluation finds `anew`.
    first_time: by what a client that never trained is evaluated, with the hyperparameters at which
    it is so.
    private: entries of the client's state that change whenever it trains, and never else.
    """

    down: Rounds | None = SIZE
    up: Rounds | None = None
    down_bits: Rounds = 0
    up_bits: Rounds = 0
    statistics: str | Mapping[str, str] = "server"
    judged: Literal["trained", "latest", "kept", "anew"] = "latest"
    first_time: dict[str, dict[str, Any]] = field(default_factory=dict)
    private: str = ""

    def judged_by(self, method: Method) -> str:
        return "trained" if getattr(method, "judge", None) == "stored" else self.judged


GLOBAL: dict[str, dict[str, Any]] = {"global": {}}
INITIAL: dict[str, dict[str, Any]] = {"initial": {}}
INITIAL_HEAD: dict[str, dict[str, Any]] = {"initial head": {}}
GLOBAL_START: dict[str, dict[str, Any]] = {"global": {"cold_start": "global"}}


each_own = partial(Expect, statistics="client")
own_models = partial(each_own, judged="trained", first_time=INITIAL)
"""A method whose clients have statistics, or whole models, of their own."""


class Expectations(dict[str, Expect]):
    """Rows by method, as complete as METHODS."""

    def __missing__(self, name: str) -> Expect:
        raise AssertionError(f"give {name} a row in tests/methods/expectations.py")


EXPECTED = Expectations()
EXPECTED |= {
    "apfl": Expect(statistics={"w": "server", "v": "client"}, private="v alpha"),
    # All tell once how many samples they have.
    "apple": each_own(SIZE * (CLIENTS - 1), (COHORT * (SIZE + 1) + CLIENTS, COHORT * (SIZE + 1))),
    "centralized": Expect(0, first_time=GLOBAL),
    "cfl": each_own(),
    "ditto": Expect(
        statistics={"w": "server", "v": "client"}, first_time=INITIAL | GLOBAL_START, private="v"
    ),
    "fedadam": Expect(first_time=GLOBAL),
    "fedala": Expect(judged="anew", first_time=GLOBAL),
    # Others' adapters, once there are any
    "fedalt": each_own((0, COHORT * LORA), LORA, private="model"),
    "fedamp": own_models((0, RETURNING * SIZE), SIZE, private="model"),
    "fedas": each_own(BODY, BODY + 1, first_time=INITIAL | {"initial head": {"judge": "received"}}),
    "fedavg": Expect(first_time=GLOBAL),
    "fedavg_by_kind": each_own(up_bits=1),
    "fedavgm": Expect(first_time=GLOBAL),
    "fedbabu": Expect(BODY, first_time=INITIAL_HEAD),
    "fedbn": each_own(first_time=GLOBAL),
    "fedcac": own_models(up_bits=SIZE),
    "fedcp": Expect(SIZE + POLICY, private="head"),
    # Before the first round all receive the initial model, and answer with a mean and a count.
    "feddbe": Expect(
        (CLIENTS * SIZE + COHORT * (SIZE + FEATURES), COHORT * SIZE + RETURNING * FEATURES),
        (CLIENTS * (FEATURES + 1) + COHORT * SIZE, COHORT * SIZE),
        private="u",
    ),
    "fd": each_own(None, judged="kept", first_time=INITIAL, private="model"),
    "feddpa": Expect(first_time=GLOBAL),
    "feddyn": Expect(first_time=GLOBAL, private="dual"),
    # The three others that trained last; a weight for the own model and each of four candidates
    # Two matrices of the products' shapes beside the pairs
    "fedex_lora": Expect(tuple(own + COHORT * RESIDUE for own in OWN_RANKS), OWN_RANKS),
    "fedfomo": own_models((0, RETURNING * 3 * SIZE), SIZE + 5),
    "fedgen": Expect(SIZE + GENERATOR + CLASSES, SIZE + CLASSES, first_time=GLOBAL),
    "fedgh": each_own(None, private="body"),
    # The entries above the 0.9-quantile stay with the client; above the 0.99-quantile, the largest
    # on the list, indices come in their place.
    "fedobp": Expect(
        (COHORT * SIZE, COHORT * (SIZE - 55)),
        SIZE,
        down_bits=(0, COHORT * SIZE),
        first_time=GLOBAL_START,
    ),
    "fedobp_adaptive": Expect(
        (COHORT * SIZE, COHORT * (SIZE - 6)), SIZE, down_bits=(0, COHORT * 6 * 32), up_bits=2
    ),
    "fedkd": each_own(None, judged="kept", first_time=INITIAL, private="model map"),
    "fedmrl": each_own(COMMON, private="body head projector"),
    "fedpac": Expect(
        (COHORT * SIZE, COHORT * (SIZE + PROTOTYPES)),
        SIZE + 2 * PROTOTYPES + CLASSES + 1,
        first_time=INITIAL_HEAD,
        private="head",
    ),
    "fedper": Expect(
        BODY, first_time=INITIAL_HEAD | {"global": {"head_init": "server_average"}}, private="head"
    ),
    "fedphp": Expect(statistics={"w": "server", "q": "client"}, first_time=GLOBAL),
    "fedproto": each_own(None, first_time=INITIAL, private="model"),
    "fedprox": Expect(first_time=GLOBAL),
    "fedpurin": own_models(None),
    "fedrep": Expect(
        BODY,
        first_time=INITIAL_HEAD | {"global": {"personal_init": "server_average"}},
        private="own",
    ),
    "fedrod": Expect(private="q"),
    "fedrolex": own_models(THREE_WIDTHS, up_bits=CLASSES, first_time={}),
    "fedsa_lora": Expect(LORA_A, private="own"),
    # A mask goes up when it is another: at 1/2 it no longer grows.
    "fedselect": own_models(
        (COHORT * SIZE, COHORT * SIZE - RETURNING * WEIGHTS // 2),
        up_bits=(COHORT * WEIGHTS, 2 * WEIGHTS),
    ),
    "fedspu": own_models(THREE_WIDTHS, down_bits=NEURONS),
    "fedtgp": each_own(None, first_time=INITIAL, private="model"),
    "fedyogi": Expect(first_time=GLOBAL),
    "ffa_lora": Expect(LORA_B + HEAD),
    "fjord": own_models(FIVE_WIDTHS, first_time={}),
    "flexfl": own_models(None, first_time={}),
    "flexlora": Expect(OWN_RANKS),
    "flora": Expect(HEAD + RESIDUE, OWN_RANKS),
    "floco": Expect(SIZE + 9 * PROTOTYPES),  # ten endpoints of the head's weight
    # After the first round all train once more, from which each has a place among three endpoints.
    "floco_plus": Expect(
        (COHORT * SIMPLEX, CLIENTS * SIMPLEX + COHORT * (SIMPLEX + 3)),
        (COHORT * SIMPLEX, (CLIENTS + COHORT) * SIMPLEX),
        statistics={"main": "server", "v": "client"},
        private="v",
    ),
    # The server changes the head's weight.
    "flute": Expect(BODY + PROTOTYPES, SIZE, up_bits=CLASSES, first_time=INITIAL_HEAD),
    "fml": each_own(COMMON, judged="kept", first_time=INITIAL, private="model"),
    "gpfl": Expect(BODY + PROTOTYPES + VALVE, first_time=INITIAL_HEAD, private="head"),
    # Client 1 holds everything.
    "heterofl": own_models(
        FALLING_WIDTHS, up_bits=CLASSES, first_time={"initial": {"scaler": True}}
    ),
    "hetlora": Expect(OWN_RANKS),
    "ifca": each_own(2 * SIZE, SIZE, up_bits=2),
    "knn_per": Expect(first_time=GLOBAL),
    "lg_fedavg": each_own(HEAD, private="own"),
    "local_only": each_own(0, judged="kept", first_time=INITIAL, private="model"),
    "moon": Expect(statistics={"main": "server", "last": "client"}, first_time=GLOBAL),
    "per_fedavg": Expect(first_time=GLOBAL),
    "pfedfda": Expect(BODY + PROTOTYPES + FEATURES * (FEATURES + 1) // 2, judged="anew"),
    "pfedhn": each_own(),
    "pfedme": Expect(judged="anew", first_time=GLOBAL),
    "pfedsd": own_models(),
    # Of clients 0 and 5 the latter, without a step, shares everything.
    "pspfl": own_models(
        (COHORT * SIZE, COHORT * SIZE - 274),
        down_bits=(0, SIZE),
        first_time=GLOBAL,
        private="score",
    ),
    "raflora": Expect(OWN_RANKS),
    "random_dropout": Expect(THREE_WIDTHS, down_bits=NEURONS, judged="anew", first_time=GLOBAL),
    "scaffold": Expect(2 * SIZE, first_time=GLOBAL, private="control"),
    "sdflora": Expect(LORA // 2, private="own"),
    "seqfededt": own_models(0, SIZE, first_time=GLOBAL),  # a hop is counted once
    "subflot": own_models(None),
}
for pruning in ("fedmp", "hermes", "prunefl"):
    bits = (COHORT * NEURONS, 2 * NEURONS)
    EXPECTED[pruning] = own_models(PRUNED_DOWN, FIVE_WIDTHS, up_bits=bits)

LIMITS = """
apfl alpha=1.0 adaptive=False => local_only
centralized => fedavg | single
cfl eps1=0.0 statistics='aggregate' => fedavg
ditto lam=0.0 => local_only
ditto personal_epochs=4 => fedavg | nobody
fedala eta=0.0 => fedavg
fedamp pull=0.0 => local_only
fedas align_epochs=0 weights='samples' judge='received' => fedper statistics='local'
fedavg_by_kind => fedavg statistics='local'
fedavgm momentum=0.0 => fedavg | atol=1e-05
fedcac tau=1.0 cutoff=-1.0 => fedavg statistics='local' | nobody equal
feddbe kappa=0.0 bias_lr=0.0 => fedavg
fd lam=0.0 => local_only
feddpa threshold=1.0 lam2=0.0 => fedavg
feddpa threshold=0.4 rule='quantile' train='joint' => fedobp q=0.4 score='fisher' scope='tensor' cold_start='global'
fedex_lora => fedavg | single
fedfomo candidates=0 fallback='keep' => local_only
fedgen alpha=0.0 beta=0.0 => fedavg
fedmp widths=(1.0,) first='current' => fedavg statistics='local' | cohort
fedobp q=1.0 scope='tensor' => fedavg
fedobp q=0.0 => fedavg | first_round
fedobp_adaptive q=(0.9,) => fedobp q=0.9
fedpac lam=0.0 combine=False head_lr=None body_epochs=1 => fedrep head_epochs=1 body_epochs=1
fedper layers=0 => fedavg
fedper layers=3 statistics='local' => local_only
fedper head_init='server_average' => fedavg | first_round
fedphp lam=0.0 => fedavg | nobody
fedproto lam=0.0 judge='head' => local_only
fedprox mu=0.0 => fedavg
fedpurin tau=1.0 cutoff=-1.0 beta=1 => fedbn | nobody equal batched_atol=1e-6
fedrep head_epochs=0 body_epochs=2 => fedbabu
fedrod gamma=0.0 => fedavg | nobody
fedrolex widths=(1.0,) scaler=False masked=False => fedavg statistics='local' | cohort
fedsa_lora => fedavg | single
fedselect alpha=0.0 => fedavg statistics='local' | nobody equal
fedspu widths=(1.0,) => fedavg statistics='local' | cohort
fjord widths=(1.0,) => fedavg statistics='local' | cohort
flexfl levels=(1.0,) devices=(1,) => fedavg statistics='local' | cohort
flexlora => sdflora share=1.0 head='averaged'
floco endpoints=1 tau=1 => fedavg
floco_plus endpoints=1 pers_epochs=2 lam=0.7 => ditto lam=0.7 | atol=0.0001
fedtgp lam=0.0 judge='head' => local_only
flute l1=0.0 l2=0.0 l3=0.0 server_lr=0.0 rep_epochs=2 => fedper
fml alpha=1.0 beta=1.0 => local_only
hermes widths=(1.0,) first='current' => fedavg statistics='local' | cohort
heterofl widths=(1.0,) scaler=True masked=False => fedavg statistics='local' | cohort equal
hetlora weighting='samples' => fedavg
ifca clusters=1 => fedavg
knn_per lam=1.0 capacity=0 => fedavg
lg_fedavg layers=3 => fedavg statistics='local'
lg_fedavg layers=0 => local_only
moon mu=0.0 => fedavg
pfedfda variant='as_published' => fedavg | nobody
pfedsd lam=0.0 => fedavg statistics='local' | nobody
prunefl widths=(1.0,) first='current' => fedavg statistics='local' | cohort
pspfl q=1.0 => fedavg statistics='local' | nobody
pspfl q=0.9 upload='all' => fedobp q=0.9 score='gradient' norm='none' cold_start='global' statistics='local' | nobody
raflora => flexlora
random_dropout widths=(1.0,) => fedavg
sdflora share=1.0 merge='averaged' head='averaged' => fedavg
sdflora share=0.0 statistics='local' => local_only
seqfededt score='difference' q=0.9 => local_only | single
subflot rates=(0.0,) alpha=1.0 mode='one' => fedavg statistics='local' | cohort
"""
"""A method and hyperparameters at which it is another one, bit for bit => that one | how far.

equal, single: the sizes of the clients, ragged if not said. cohort, nobody: who is also evaluated
as by the other, everyone between rounds if not said, or the cohort in its round alone. first_round:
models are the same after the first one alone. atol: where rounding differs; `batched_atol`: on the
batched backend.
"""

RANGES = """
must be 0 or more, or -1 | -0.5 | fedcac.cutoff
must be 0 or more, and not all 0 | (0, 0, 0) | flexfl.devices
must be above 0 | 0.0 | fedpurin.tau pfedfda.eps
must be above 0 and at most 1 | (0.0,) | fedrolex.widths
must be one or more, ascending | (0.5, 0.5) | fedobp_adaptive.q
must be below 2 / lam = 0.1333, or it diverges | 0.2 | pfedme.inner_lr pfedme.outer_lr
must be at most 3, the network's layers, got 4$ | 4 | fedper.layers
the network has layers 0 to 2, got 3 | 3 | fedselect.personalise
"""
"""How the refusal goes on after the key | a value out of range | method.key of each."""
