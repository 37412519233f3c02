"""Whole rounds against plain loops: ragged clients, momentum, weight decay, half the clients a
round.

Tolerance 1e-6 absolute after three rounds on both backends (parameters are of order 0.1): another
memory layout of the convolution and a float64 average in the reference leave rounding only.
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fedpfl.engine.keys import Draws, generator
from fedpfl.ground import tree
from fedpfl.methods import (
    PSPFL,
    Ditto,
    FedAdam,
    FedAMP,
    FedAS,
    FedAvg,
    FedAvgM,
    FedBABU,
    FedBN,
    FedDPA,
    FedOBP,
    FedPer,
    FedPHP,
    FedProx,
    FedRep,
    FedSelect,
    FedYogi,
    LGFedAvg,
    LocalOnly,
    Method,
    Moon,
    PFedSD,
    Scaffold,
    SeqFedEDT,
)
from tests.conftest import COHORTS, HEAD, LOCAL, assert_close, client_row, record_rounds
from tests.methods.reference import (
    fedamp,
    fedas,
    feddpa,
    fedphp,
    fedselect,
    moon,
    pfedsd,
    plain,
    seqfededt,
)
from tests.methods.reference.conftest import SEED, evaluated_weights

LONGER = [*COHORTS, [0, 2, 4, 8, 9]]
PLANNED = 7  # rounds of FedPHP's run; half the clients join each: int(3.5) times are expected
NORMS = ("norm",)


def personal_order(t: int, client: int, epoch: int, samples: int) -> Tensor:
    return Draws(SEED, "train", t).order(client, "personal", epoch, samples)


def alignment_order(t: int, client: int, epoch: int, samples: int) -> Tensor:
    return Draws(SEED, "train", t).order(client, "align", epoch, samples)


def client_turns(t: int, clients: int) -> list[int]:
    return torch.randperm(clients, generator=generator(SEED, "turns", t)).tolist()


Loops = Callable[[plain.Setting], plain.Result]


@dataclasses.dataclass(frozen=True)
class Case:
    """A method, and its rounds by plain loops.

    norm: with BatchNorm, whose statistics are compared too. evaluated: `personal` is what clients
    are evaluated by.
    margin: how far anything lies from a threshold at least. rounds: how many are planned.
    """

    method: Method
    loops: Loops
    norm: bool = False
    atol: float = 1e-6
    rtol: float = 0.0
    cohorts: tuple[tuple[int, ...], ...] = tuple(map(tuple, COHORTS))
    evaluated: bool = True
    margin: float = 0.0
    rounds: int = 3


def longer(method: Method, loops: Loops, margin: float = 1e-7) -> Case:
    return Case(method, loops, cohorts=tuple(map(tuple, LONGER)), margin=margin)


def with_norm(method: Method, loops: Loops, **more: Any) -> Case:
    return Case(method, loops, norm=True, **{"atol": 5e-6, "rtol": 1e-5, **more})


def as_fedamp(method: FedAMP) -> Loops:
    values = (method.variant, method.sigma, method.share, method.pull)
    return lambda s: fedamp.fedamp(
        s, *values, method.start_from == "cloud", method.pool == "last_round"
    )


def as_fedas(method: FedAS) -> Loops:
    values = dataclasses.astuple(method)[1:]  # but for where statistics stay
    return lambda s: fedas.fedas(s, *values, alignment_order)


def as_fedphp(method: FedPHP) -> Loops:
    return lambda s: fedphp.fedphp(s, method.transfer, method.lam, method.momentum, PLANNED)


AMP = {  # at a sigma of the order of these networks' squared distances
    "fedamp": FedAMP(sigma=0.3, pull=2.0),
    "fedamp-cloud": FedAMP(sigma=0.3, start_from="cloud", pool="last_round", pull=0.5),
    "heurfedamp": FedAMP("heurfedamp", sigma=20.0, share=0.8, pull=1.0),
    "heurfedamp-cloud": FedAMP("heurfedamp", sigma=50.0, share=0.6, pull=0.0, start_from="cloud"),
}
AS = {
    "fedas": FedAS(align_lr=0.01),
    "fedas-init": FedAS(align_lr=0.1, align_epochs=2, first="init", judge="received"),
    "fedas-means": FedAS(align_lr=0.1, first="global", align="means", weights="samples"),
}
PHP = {
    "fedphp": (False, FedPHP("kd", 0.1, 0.9, 0.5), 5e-6),
    "fedphp-mmd": (False, FedPHP("mmd", 0.6, 0.5, 0.5), 2e-5),
    "fedphp-norm": (True, FedPHP("kd", 0.7, 0.9, 0.5), 5e-6),
    "fedphp-mmd-norm": (True, FedPHP("mmd", 0.3, 0.9, 0.5), 2e-5),
}

CASES: dict[
    str, Case
] = {  # the first of each method is asked by make test, all of them by make test-all
    "fedavg": Case(FedAvg(), plain.fedavg),
    "fedavg-norm": with_norm(FedAvg(), plain.fedavg),
    "fedobp": Case(FedOBP(q=0.9), lambda s: plain.fedobp(s, 0.9), margin=1e-5),
    "fedobp-few": Case(FedOBP(q=0.995, norm="none"), lambda s: plain.fedobp(s, 0.995), margin=1e-5),
    "fedobp-most": Case(FedOBP(q=0.25), lambda s: plain.fedobp(s, 0.25), margin=1e-5),
    "fedper": Case(FedPer(), lambda s: plain.fedper(s, HEAD)),
    "ditto-short": Case(Ditto(lam=0.7, personal_epochs=1), lambda s: plain.ditto(s, 0.7, 1)),
    "ditto": Case(Ditto(lam=0.7), lambda s: plain.ditto(s, 0.7, LOCAL.epochs)),
    "ditto-long": Case(Ditto(lam=2.0, personal_epochs=3), lambda s: plain.ditto(s, 2.0, 3)),
    "local_only-norm": with_norm(LocalOnly(), plain.local_only),
    "local_only": Case(LocalOnly(), plain.local_only),
    "lg_fedavg-two": Case(LGFedAvg(layers=2), lambda s: plain.lg_fedavg(s, ("classifier", "fc"))),
    "lg_fedavg": Case(LGFedAvg(), lambda s: plain.lg_fedavg(s, ("classifier",))),
    "lg_fedavg-as_published": Case(
        LGFedAvg(variant="as_published"), lambda s: plain.lg_fedavg(s, ("conv",))
    ),
    "fedbn": with_norm(FedBN(), lambda s: plain.fedbn(s, NORMS)),
    "fedrep-norm": with_norm(FedRep(), lambda s: plain.fedrep(s, HEAD, 1, 1)),
    "fedrep": Case(FedRep(), lambda s: plain.fedrep(s, HEAD, 1, 1)),
    "fedrep-long": Case(
        FedRep(body_epochs=2, head_epochs=3), lambda s: plain.fedrep(s, HEAD, 3, 2)
    ),
    "fedbabu": Case(FedBABU(), lambda s: plain.fedbabu(s, HEAD)),
    "fedprox": Case(FedProx(mu=0.5), lambda s: plain.fedavg(s, mu=0.5)),
    "fedavgm-slow": Case(
        FedAvgM(lr=0.3, momentum=0.5), lambda s: plain.fedopt(s, "avgm", 0.3, 0.5)
    ),
    "fedavgm": Case(FedAvgM(), lambda s: plain.fedopt(s, "avgm", 1.0, 0.9)),
    "fedadam": Case(FedAdam(), lambda s: plain.fedopt(s, "adam", 0.01, 0.9, 0.99, 0.001)),
    "fedadam-wide": Case(
        FedAdam(0.1, 0.5, 0.6, 0.05), lambda s: plain.fedopt(s, "adam", 0.1, 0.5, 0.6, 0.05)
    ),
    "fedyogi": Case(FedYogi(), lambda s: plain.fedopt(s, "yogi", 0.01, 0.9, 0.99, 0.001)),
    "fedyogi-wide": Case(
        FedYogi(0.1, 0.5, 0.6, 0.05), lambda s: plain.fedopt(s, "yogi", 0.1, 0.5, 0.6, 0.05)
    ),
    "moon-norm": with_norm(Moon(5.0, 0.2), lambda s: moon.moon(s, 5.0, 0.2), evaluated=False),
    "moon": Case(Moon(), lambda s: moon.moon(s, 1.0, 0.5), evaluated=False),
    "moon-strong": Case(Moon(5.0, 0.2), lambda s: moon.moon(s, 5.0, 0.2), evaluated=False),
    "feddpa": Case(
        FedDPA(threshold=0.05, lam1=0.5, lam2=0.3, clip=0.2),
        lambda s: feddpa.feddpa(s, "value", 0.05, (0.5, 0.3, 0.2), personal_order),
        atol=1e-5,
        margin=1e-6,
    ),
    "feddpa-value": Case(
        FedDPA(threshold=0.05, train="joint"),
        lambda s: feddpa.feddpa(s, "value", 0.05, None, personal_order),
        atol=1e-5,
        margin=1e-6,
    ),
    "feddpa-as_compared": Case(
        FedDPA(rule="quantile", train="joint"),
        lambda s: feddpa.feddpa(s, "quantile", FedDPA().threshold, None, personal_order),
        atol=1e-5,
        margin=1e-6,
    ),
    **{
        name: Case(method, as_fedamp(method), norm="cloud" in name, atol=5e-6, rtol=1e-5)
        for name, method in AMP.items()
    },
    **{f"{name}-norm": with_norm(method, as_fedas(method)) for name, method in AS.items()},
    **{name: Case(method, as_fedas(method), atol=5e-6, rtol=1e-5) for name, method in AS.items()},
    **{
        name: Case(method, as_fedphp(method), norm, atol, 1e-5, rounds=PLANNED)
        for name, (norm, method, atol) in PHP.items()
    },
    "fedselect": longer(FedSelect(), lambda s: fedselect.fedselect(s, personal_order, 0.25, 0.8)),
    "fedselect-norm": with_norm(
        FedSelect(), lambda s: fedselect.fedselect(s, personal_order, 0.25, 0.8), margin=1e-6
    ),
    "fedselect-half": longer(
        FedSelect(p=0.5, alpha=0.5), lambda s: fedselect.fedselect(s, personal_order, 0.5, 0.5)
    ),
    "fedselect-all": longer(
        FedSelect(p=0.3, scope="all", lr_v=0.02, lr_u=0.08),
        lambda s: fedselect.fedselect(
            s, personal_order, 0.3, 0.8, scope="all", lr_v=0.02, lr_u=0.08
        ),
    ),
    "fedselect-window": longer(
        FedSelect(p=0.4, delta="window", every=1),
        lambda s: fedselect.fedselect(s, personal_order, 0.4, 0.8, "window", 1),
    ),
    "pspfl-norm": with_norm(PSPFL(0.5), lambda s: fedselect.pspfl(s, 0.5, "shared"), margin=1e-6),
    "pspfl": longer(PSPFL(0.5), lambda s: fedselect.pspfl(s, 0.5, "shared")),
    "pspfl-most": longer(PSPFL(0.1), lambda s: fedselect.pspfl(s, 0.1, "shared")),
    "pspfl-all": longer(PSPFL(0.7, "all"), lambda s: fedselect.pspfl(s, 0.7, "all")),
    "seqfededt-most": longer(
        SeqFedEDT("importance", 0.3),
        lambda s: seqfededt.seqfededt(s, client_turns, "importance", 0.3),
        margin=1e-4,
    ),
    "seqfededt": longer(
        SeqFedEDT(q=0.9),
        lambda s: seqfededt.seqfededt(s, client_turns, "squared", 0.9),
        margin=1e-4,
    ),
    "seqfededt-norm": with_norm(
        SeqFedEDT(q=0.9),
        lambda s: seqfededt.seqfededt(s, client_turns, "squared", 0.9),
        margin=1e-6,
    ),
    "seqfededt-classifier": longer(
        SeqFedEDT("difference", 0.5, classifier_only=True),
        lambda s: seqfededt.seqfededt(s, client_turns, "difference", 0.5, "classifier"),
        margin=1e-4,
    ),
    "pfedsd-norm": with_norm(PFedSD(), lambda s: pfedsd.pfedsd(s, 0.5, 3.0)),
    "pfedsd": longer(PFedSD(), lambda s: pfedsd.pfedsd(s, 0.5, 3.0)),
    "pfedsd-train": longer(
        PFedSD(lam=1.0, tau=1.0, teacher="train"), lambda s: pfedsd.pfedsd(s, 1.0, 1.0, still=False)
    ),
}


def first_of_each_method() -> set[str]:
    names = dict[type, str]()
    for name, case in CASES.items():
        names.setdefault(type(case.method), name)
    return set(names.values())


ASKED = [
    pytest.param(name, marks=[] if name in first_of_each_method() else [pytest.mark.full])
    for name in CASES
]


def shared_model(server: Any) -> dict[str, Tensor]:
    """The model alone: FedBABU's server keeps the head apart, others an optimiser's moments."""
    return server.get("body", server.get("model", server))


def without_counters(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the number of batches the server has the cohort's largest."""
    return {name: leaf for name, leaf in weights.items() if leaf.is_floating_point()}


def assert_part_of(got: dict[str, Tensor], want: plain.Weights, case: Case) -> None:
    """Compare what is there with the loops' entries of these names."""
    wanted = {name: want[name] for name in without_counters(got)}
    assert_close(without_counters(got), wanted, atol=case.atol, rtol=case.rtol)


@pytest.fixture(scope="module")
def expected(setting, normed):
    @cache
    def play_loops(name: str) -> plain.Result:
        case = CASES[name]
        own = normed[1] if case.norm else setting
        return case.loops(
            dataclasses.replace(own, cohorts=[list(cohort) for cohort in case.cohorts])
        )

    return play_loops


@pytest.mark.parametrize("name", ASKED)
def test_rounds_equal_the_plain_loops(name, backend, expected, normed, net, federation):
    """After every round: the shared model, what clients are evaluated by, and the cohort's hits
    before and after.
    """
    case, want = CASES[name], expected(name)
    assert min(want.margins, default=1.0) > case.margin, (
        "choose another seed: rounding could cross a threshold"
    )
    assert not want.counts or max(want.counts) > 0
    method, net = case.method, (normed[0] if case.norm else net).with_facts(rounds=case.rounds)
    cohorts = [list(cohort) for cohort in case.cohorts]
    states, outcomes = record_rounds(method, net, federation, cohorts, engine=backend, seed=SEED)
    role = next(iter(method.buffers()))
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        statistics = state.server_buffers.get(role, {}) if case.norm else {}
        shared = {**shared_model(state.server), **statistics}
        assert_part_of(shared, want.shared[t] if want.shared else {}, case)
        for client, personal in enumerate(want.personal[t]):
            if case.evaluated:
                assert_part_of(
                    evaluated_weights(method, net, federation, state, client), personal, case
                )
            else:
                last = {
                    **client_row(state.clients["last"], client),
                    **client_row(state.client_buffers.get("last", {}), client),
                }
                assert_part_of(last, personal, case)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


@pytest.mark.parametrize("server_lr", [0.5, pytest.param(1.0, marks=pytest.mark.full)])
def test_scaffold_equals_its_formula(server_lr, backend, setting, net, federation):
    """Controls are gradients, ten times a step; the formula divides small differences by lr."""
    local = dataclasses.replace(LOCAL, momentum=0.0, weight_decay=0.0)
    want = plain.scaffold(setting, server_lr)
    method = Scaffold(server_lr=server_lr)
    states, outcomes = record_rounds(
        method, net, federation, engine=backend, seed=SEED, local=local
    )
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(state.server["model"], want.shared[t], atol=2e-6)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


def test_the_server_counts_the_batches_of_the_cohorts_largest(normed, federation):
    states = record_rounds(FedAvg(), normed[0], federation, seed=SEED)[0]
    counted = [
        int(state.server_buffers["main"]["norm.num_batches_tracked"]) for state in states[1:]
    ]
    assert counted == [4, 10, 14]  # two epochs of 2, 3 and 2 batches


def test_fedobp_sends_what_is_not_personal(expected, net, federation):
    want, outcomes = (
        expected("fedobp"),
        record_rounds(CASES["fedobp"].method, net, federation, seed=SEED)[1],
    )
    personal = [
        tree.size(net.params) * len(cohort) - outcome.traffic.values_down
        for cohort, outcome in zip(COHORTS, outcomes, strict=True)
    ]
    assert personal == [sum(want.counts[5 * t : 5 * t + 5]) for t in range(3)]
    assert sum(personal) > 0


@pytest.mark.full
def test_the_plain_loops_tell_the_methods_apart(expected):
    """Otherwise agreement would mean nothing."""
    names = [name for name, case in CASES.items() if not case.norm]
    last = {
        name: torch.cat([leaf.flatten() for leaf in expected(name).personal[-1][2].values()])
        for name in names
    }
    for one, other in itertools.combinations(names, 2):
        assert (last[one] - last[other]).abs().max() > 1e-4, (one, other)
