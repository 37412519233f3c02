"""What would give a wrong number in silence is found: models that are not finite, hooks that break
the contract.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from fedpfl.engine import Engine, make_initial_state
from fedpfl.engine.backends import selection as select
from fedpfl.engine.evaluate import non_finite_clients, scores_per_client
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS, FedAvg, LocalOnly, Phase
from tests.command import TINY, read_summary, read_table, run_command
from tests.conftest import CPU, LOCAL, evaluate, make_federation, next_round, tiny

COHORT = [0, 1, 2]
FEDERATION = make_federation((40, 33, 20), (10, 8, 16))


def one_round(method, engine="loop", net=None, **local):
    net = net or tiny()
    state = make_initial_state(method, net, 3, CPU)
    values = {"engine": engine, "local": replace(LOCAL, **local)}
    return next_round(method, net, FEDERATION, state, COHORT, **values)


@pytest.fixture
def registered(monkeypatch):
    """Make a method known to the command line, with the hyperparameters that are given."""

    def register(name, method):
        monkeypatch.setitem(METHODS, name, method)

    return register


@pytest.mark.parametrize("backend", ["loop", "batched"])
def test_a_model_that_is_not_finite_has_no_accuracy(backend):
    net, method = tiny(), LocalOnly()
    state = make_initial_state(method, net, 3, CPU)
    broken = state.client([1])
    broken["model"]["classifier.bias"][0, 0] = torch.nan
    state.rows.put_([1], {"client": broken})
    counts = evaluate(method, net, FEDERATION, state, backend)
    assert non_finite_clients(counts) == [1]
    defined = [value == value for value in scores_per_client(counts)["accuracy"]]
    assert defined == [True, False, True]


@pytest.mark.parametrize("backend", ["loop", "batched"])
def test_what_the_server_makes_of_finite_uploads_is_looked_at(backend):
    @dataclass(frozen=True)
    class Exploding(FedAvg):
        def aggregate(self, server, clients, net, uploads, weight, generator):
            return tree.map(lambda leaf: leaf.sum(0) * torch.inf, uploads), clients

    _, outcome = one_round(Exploding(), backend)
    assert outcome.finite.all()
    assert not outcome.state_is_finite


def test_statistics_that_are_not_finite_are_found():
    @dataclass(frozen=True)
    class Scaled(FedAvg):
        def start(self, received, client):
            return {**received, "conv.weight": received["conv.weight"] * 1e30}

        def finish(self, server, client, start, end):
            return server, client

    _, outcome = one_round(Scaled(), net=tiny(norm=True))
    assert not outcome.finite.any()


def test_a_server_step_that_explodes_ends_the_run(tmp_path):
    result = run_command("method=scaffold", "method.server_lr=1e30", *TINY, cwd=tmp_path)
    assert result.code == 3
    assert len(result.complaints) == 1
    assert "diverged" in result.complaints[0]
    (path,) = tmp_path.glob("outputs/digits/scaffold/*/seed42")
    assert read_summary(path)["status"] == "diverged"
    for row in read_table(path / "rounds.csv") if (path / "rounds.csv").exists() else ():
        assert row["accuracy"] in ("", *row["accuracy"].split()), row


def test_fine_tuning_that_diverges_leaves_its_columns_empty_and_says_so(tmp_path, registered):
    @dataclass(frozen=True)
    class Wild(FedAvg):
        def finetuning(self, params, parts, epochs):
            return [Phase(epochs, sgd={"lr": 1e30})]

    registered("fedavg", Wild)
    result = run_command(
        "method=fedavg", *TINY, "eval.finetune_epochs=1", "eval.finetune_every=1", cwd=tmp_path
    )
    assert result.code == 0
    assert "fine-tuning diverged at" in result.err
    (path,) = tmp_path.glob("outputs/digits/fedavg/*/seed42")
    rows = read_table(path / "rounds.csv")
    assert all(row["accuracy"] and not row["ft_accuracy"] and not row["ft_loss"] for row in rows)
    assert all(row["participants"] == "2" for row in rows)
    clients = read_table(path / "clients.csv")
    assert any(row["ft_accuracy"] in ("", "nan") for row in clients)
    assert (
        "ft_accuracy" not in read_summary(path)["last"]
        or read_summary(path)["last"]["ft_accuracy"] is None
    )
    assert "fine-tuning diverged" in (path / "run.log").read_text()


@pytest.mark.parametrize(
    ("name", "meant"),
    [("strat", "start"), ("aggregates", "aggregate"), ("before_train", "before_training")],
)
def test_a_hook_of_a_misspelled_name_is_refused(name, meant):
    with pytest.raises(
        FedpflError, match=f"Mine.{name} is no hook of a method; did you mean {meant}"
    ):
        type("Mine", (FedAvg,), {name: lambda self: None})


@pytest.mark.parametrize(
    "made",
    [lambda self: None, staticmethod(min), classmethod(min), property(min)],
    ids=lambda made: type(made).__name__,
)
def test_a_public_method_that_is_no_hook_is_refused_and_a_private_one_is_not(made):
    with pytest.raises(
        FedpflError, match=r"Mine.helper is no hook of a method; what is not begins with _$"
    ):
        type("Mine", (FedAvg,), {"helper": made})
    type("Mine", (FedAvg,), {"_helper": made})


def test_a_choice_that_is_slow_here_is_told_before_the_first_round(tmp_path):
    told = run_command("method=fedavg", *TINY, "engine=batched", "rounds=1", cwd=tmp_path).err
    assert "use engine.backend=auto" in told
    assert select.slowness_notices(Engine("loop"), CPU) == []
