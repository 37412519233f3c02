"""Clients with networks of several kinds: each trains as in a run of its kind alone, bit for bit, and
the server sees what all have in one form.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedpfl.engine import Engine, RoundSetup, Store, make_backend, make_initial_state, play_round
from fedpfl.engine.backends.by_kind import BackendByKind
from fedpfl.engine.backends.lockstep import LockstepBackend, LockstepStage
from fedpfl.engine.calls import EvalCall, TrainCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.store import Rows, RowStorage
from fedpfl.ground import tree
from fedpfl.ground.errors import MethodError
from fedpfl.methods import METHODS, Turn
from fedpfl.methods.local_only import LocalOnly
from fedpfl.models import MODELS, Mixed, MixedNet, build_kinds, build_network
from tests.conftest import CLASSES, COHORTS, CPU, LOCAL, assert_same, make_federation, record_rounds

KINDS = [0, 1, 2, 2, 1, 0, 0, 2, 1, 0]
SMALL = {"name": "mlp", "hidden": [6]}
LOOP = Engine("loop", workers=2)


class Normed(nn.Sequential):
    """A network with statistics that only its kind has."""

    def __init__(self, shape: tuple[int, ...], classes: int):
        norm, end = nn.BatchNorm1d(7), nn.Linear(7, classes)
        super().__init__(nn.Flatten(), nn.Linear(64, 7), norm, nn.Tanh(), end)


@pytest.fixture(scope="module", autouse=True)
def normed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "normed", Normed)
        yield


def build(*kinds, names=KINDS):
    one = partial(build_network, shape=(1, 8, 8), classes=CLASSES, seed=1)
    nets = build_kinds(Mixed(kinds=kinds, features=6), one)
    return MixedNet(nets, names) if len(nets) > 1 else nets[0]


@pytest.fixture(scope="module")
def kinds(normed):
    return build(SMALL, {"name": "mlp", "hidden": [9, 5]}, "normed")


@pytest.fixture(scope="module")
def federation():
    return make_federation()


def as_values(outcomes):
    return [{**vars(one), "traffic": one.traffic._asdict()} for one in outcomes]


@pytest.mark.parametrize("name", ["local_only", "lg_fedavg", "fedproto"])
@pytest.mark.parametrize("backend", ["loop", "batched"])
def test_one_kind_is_the_run_of_its_network_bit_for_bit(name, backend, federation):
    method = METHODS[name]()
    nets = build(SMALL), build_network("mlp", (1, 8, 8), CLASSES, 1, hidden=[6])
    runs = [record_rounds(method, net, federation, engine=backend) for net in nets]
    assert_same(*(as_values(outcomes) for _, outcomes in runs))
    ends = [
        tree.leaves({"server": states[-1].server, "own": states[-1].clients}) for states, _ in runs
    ]
    assert_same(*(dict(enumerate(end)) for end in ends))


@pytest.mark.parametrize("backend", ["loop", "batched"])
def test_a_client_alone_learns_as_among_its_kind_alone(backend, kinds, federation):
    """No row is read or written under another kind, nor are statistics."""
    states, outcomes = record_rounds(LocalOnly(), kinds, federation, engine=backend)
    clients = list(range(10))
    for kind, net in enumerate(kinds.nets):
        alone, judged = record_rounds(LocalOnly(), net, federation, engine=backend)
        for state, plain in zip(states, alone, strict=True):
            for client in [client for client in clients if KINDS[client] == kind]:
                for part in ("client", "buffers", "facts"):
                    found, wanted = (one.rows.take(part, client) for one in (state, plain))
                    if backend == "loop":
                        assert_same(found, wanted)
                    else:  # of another width
                        tree.map(torch.testing.assert_close, found, wanted)
        for outcome, own in zip(outcomes, judged, strict=True):
            rows = [row for row, client in enumerate(outcome.cohort) if KINDS[client] == kind]
            pairs = ((outcome.loss, own.loss), (outcome.after.loss, own.after.loss))
            for found, wanted in pairs:
                torch.testing.assert_close(found[rows], wanted[rows])


@pytest.mark.parametrize("name", ["lg_fedavg", "fedproto"])
def test_backends_agree_wherever_rows_are(name, kinds, federation, tmp_path):
    """Costs by kind and settings of single clients change nothing."""
    method = METHODS[name]()
    ends = []
    for backend, store in (("loop", "auto"), ("loop", "disk"), ("batched", "auto")):
        storage = RowStorage(Store(store), tmp_path)
        state = make_initial_state(method, kinds, 10, CPU, storage)
        engine = make_backend(Engine(backend, workers=1), kinds, CPU)
        setup = RoundSetup(engine, method, federation, LOCAL, 0)
        for cohort in COHORTS:
            state, outcome = play_round(setup, state, cohort, None if backend == "loop" else {})
        again = make_initial_state(method, kinds, 10, CPU)
        again.rows.load_(state.rows.saved())
        rows = [
            [one.rows.take(part, c) for part in ("client", "buffers")]
            for one in (state, again)
            for c in range(10)
        ]
        assert_same(rows[:10], rows[10:])
        ends.append(
            {
                "server": state.server,
                "rows": dict(enumerate(row[0] for row in rows[:10])),
                "loss": outcome.loss,
            }
        )
    (load,) = outcome.turn_loads
    sizes = dict(zip(load.clients, load.flops[:, 0].tolist(), strict=True))
    assert len({*sizes.values()}) > 1
    assert_same(ends[0], ends[1])
    tree.map(partial(torch.testing.assert_close, atol=2e-6, rtol=1e-4), ends[0], ends[2])


def test_the_server_sees_what_all_kinds_have_in_one_form(kinds, federation):
    """Its mean is that of all heads, each weighed by its client's samples."""
    seen = []

    class Watching(METHODS["lg_fedavg"]):
        takes_kinds = True

        def init(self, params, parts):
            server, client = super().init(params, parts)
            return server, {**client, "count": torch.zeros(())}

        def before_turn(self, server, clients, read_states, generator):
            seen.append((clients, read_states([0, 1])))
            return {}

        def finish(self, server, client, start, params):
            upload, own = super().finish(server, client, start, params)
            return upload, {**own, "count": client["count"] + 1}

        def aggregate(self, server, clients, net, uploads, weight, generator):
            seen.append((clients, uploads))
            return super().aggregate(server, clients, net, uploads, weight, generator)

    # The second cohort is of one kind.
    states, _ = record_rounds(Watching(), kinds, federation, [[0, 2, 4], [0, 5, 6]])
    shown = [seen[0][0], seen[0][1], seen[1][0], seen[2][0], seen[2][1], seen[3][0]]
    assert all(part.keys() & {"own", "count"} == {"count"} for part in shown)
    uploads, sizes = seen[1][1], federation.train_sizes[[0, 2, 4]].float()
    for name, stacked in uploads.items():
        mean = torch.tensordot(sizes / sizes.sum(), stacked, 1)
        torch.testing.assert_close(states[1].server[name], mean)
    counts = [float(states[2].rows.take("client", client)["count"]) for client in range(7)]
    assert counts == [2, 0, 1, 0, 1, 1, 1]


def test_rows_of_many_clients_stand_with_their_kind():
    """Blocks have room for several clients from the sixteenth on."""
    forms = [{"client": {"own": torch.zeros(size), "count": torch.zeros(())}} for size in (2, 3)]
    rows = Rows(forms[0], {}, 60, CPU, other_kinds=forms[1:], kinds=[0, 1, 1] * 20)
    for client in range(60):
        own = torch.full((1, 2 + rows.kinds[client]), float(client))
        rows.put_([client], {"client": {"own": own}})
    for client in range(60):
        assert rows.take("client", client)["own"].tolist() == [client] * (2 + rows.kinds[client])
    assert rows.common == {"client": ["count"]}


def test_a_survey_stores_nothing_and_an_heir_says_for_itself_what_it_takes(kinds, federation):
    class Asking(LocalOnly):
        takes_kinds = True

        def turns(self, played, cohort, clients, generator):
            return [Turn(cohort, lambda server, clients, uploads: (server, clients)), Turn([0])]

    class Heir(LocalOnly):
        pass

    (before, after), _ = record_rounds(Asking(), kinds, federation, [[0, 1, 2]])
    for client in (1, 2):
        assert_same(*(one.rows.take("client", client) for one in (before, after)))
    assert not Heir.takes_kinds


def test_the_narrowest_engine_is_that_of_all_kinds(kinds):
    backends = [SimpleNamespace(name="batched", engine=Engine(width=width)) for width in (0, 4, 9)]
    assert BackendByKind(kinds, backends).engine.width == 4


class Broken(LocalOnly):
    """What it keeps is not a number, or lacks an entry."""

    takes_kinds = True

    def finish(self, server, client, start, params):
        if self.statistics is None:
            return {}, {"model": tree.map(lambda leaf: leaf / 0, params)}
        return {}, {"model": tree.drop(params, ["head.bias"])}


def test_what_only_a_kind_has_is_finite_and_of_inits_form(kinds, federation):
    _, (outcome,) = record_rounds(Broken(), kinds, federation, [[0, 1]])
    assert (outcome.finite.tolist(), outcome.state_is_finite) == ([False, False], False)
    with pytest.raises(MethodError, match=r"Broken.finish returned a client state in another form"):
        record_rounds(Broken(statistics="local"), kinds, federation, [[0, 1]])


def test_calls_of_several_runs_come_together_by_kind(kinds, federation):
    """In lockstep, and newcomers of any kind beside members."""
    backend, method = make_backend(LOOP, kinds, CPU), METHODS["lg_fedavg"]()
    calls = []
    for seed, cohort in enumerate(COHORTS[:2]):
        state = make_initial_state(method, kinds, 10, CPU, seed=seed)
        calls.append(TrainCall(method, federation, state, cohort, LOCAL, Draws(seed, "train", 1)))
    newcomers = make_initial_state(method, MixedNet(kinds.nets, [2, 0, 1]), 3, CPU)
    state = replace(newcomers, members=calls[0].state.rows)
    calls.append(EvalCall(method, make_federation((20, 20, 20), (9, 8, 7)), state, [0, 1, 2]))

    def ask(call):
        return LockstepBackend(stage, backend).run_one(call)

    stage = LockstepStage(3)
    together = stage.play([partial(ask, call) for call in calls])
    alone = [backend.run_one(call) for call in calls]
    assert_same(together, alone)
    assert together[2]["test"].total.tolist() == [9, 8, 7]
    assert "own" not in together[0].client_states
