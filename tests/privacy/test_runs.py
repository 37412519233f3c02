"""Private runs as a user meets them: columns, first lines, refusals in one line, resuming and extending."""

import csv
import json

import pytest

from fedpfl.report.load import runs
from fedpfl.report.tables import accuracy_table
from tests.command import call, wait
from tests.conftest import sampled
from tests.engine.test_ranks import torchrun
from tests.record.test_damage import interrupt

pytest.importorskip("dp_accounting", reason="needs the extra [privacy]")

SMALL = (
    "dataset=digits",
    "clients=6",
    "participation=0.5",
    "rounds=3",
    "eval.every=1",
    "model=mlp",
    "local.epochs=1",
    "checkpoint.seconds=0",
    "privacy=client",
)
OWN = ("method=fedper", "privacy.noise=2", "privacy.clip=0.05", "privacy.quantile=0.5", "privacy.count_noise=2")
LINES = [
    ("method=fedobp method.q=0.9", "its server would see what clients keep, not a mean of uploads"),
    ("method=fedproto", "its server would see each client's upload, not a mean of uploads"),
    ("method=heterofl", "its server would see each client's upload"),
    ("method=pfedfda", "nobody knows what an upload without training would be"),
    ("method=local_only", "send nothing up"),
    ("privacy.epsilon=null", "privacy.epsilon must be given, or else noise"),
    ("privacy.noise=1", "privacy.epsilon must be given, or else noise"),
    ("privacy.epsilon=0", "privacy.epsilon must be"),
    ("privacy.epsilon=-1", "privacy.epsilon must be"),
    ("privacy.epsilon=much", "privacy.epsilon must be"),
    ("privacy.delta=0", "privacy.delta must be"),
    ("privacy.delta=1", "privacy.delta must be"),
    ("privacy.clip=0", "privacy.clip must be"),
    ("privacy.clip=null", "privacy.clip must be a number where there is noise"),
    ("privacy.epsilon=null privacy.noise=0 privacy.clip=null privacy.quantile=0.5", "privacy.clip must be a number"),
    ("privacy.epsilon=null privacy.noise=-1", "privacy.noise must be"),
    ("privacy.quantile=1", "privacy.quantile must be"),
    ("privacy.count_noise=1", "privacy.count_noise must be null"),
    ("privacy.quantile=0.5 privacy.rate=0", "privacy.rate must be"),
    ("privacy.quantile=0.5 privacy.epsilon=0.5", "out of reach in 3 rounds of 3 of 6 clients"),
    ("privacy.sampling=uniform", "privacy.sampling must be"),
    ("privacy.accounting=gdp", "privacy.accounting must be"),
    ("privacy.accounting=pld", "privacy.accounting must be rdp"),
    ("privacy.epsilon=null privacy.noise=1 privacy.accounting=pld", "privacy.accounting must be rdp"),
    ("privacy.sampling=poisson method=scaffold", "use fixed"),
    ("privacy.sampling=poisson participation=0.17 rounds=60", "draws nobody for round"),
    ("privacy.sigma=1", "privacy.sigma is not a key here"),
    ("privacy.epsilon=inf", "privacy.epsilon must be"),
    ("privacy.delta=-1e-5", "privacy.delta must be"),
    ("privacy.clip=-0.1", "privacy.clip must be"),
    ("privacy.clip=nan", "privacy.clip must be"),
    ("privacy.quantile=0", "privacy.quantile must be"),
    ("privacy.quantile=0.5 privacy.count_noise=-1", "privacy.count_noise must be"),
    ("privacy.epsilon=null privacy.noise=loud", "privacy.noise must be"),
    ("privacy.sampling=null", "privacy.sampling must be"),
    ("privacy=server", "privacy"),
    ("stopping.early=true", "stopping.early would tell the server"),
    ("system=simulated", "use system=none"),
    ("validation=0.2", "use validation=0"),
    ("model=resnet8 model.norm=batch dataset=digits", "method.statistics=local"),
]


@pytest.mark.parametrize(("words", "told"), sampled(LINES, 3))
def test_a_bad_configuration_is_one_line(words, told, tmp_path):
    given = words.split()
    method = [] if any(word.startswith("method=") for word in given) else ["method=fedavg"]
    epsilon = [] if any(word.startswith("privacy.epsilon=") for word in given) else ["privacy.epsilon=8"]
    result = call(*SMALL, *method, *epsilon, *given, "hydra.run.dir=run", cwd=tmp_path)
    assert result.code == 2
    assert len(result.complaints) == 1, result.err
    assert told in result.complaints[0]
    assert not (tmp_path / "run/rounds.csv").exists()


def rows(path):
    with open(path / "rounds.csv") as file:
        seconds = ("seconds", "eval_seconds")
        return [{key: cell for key, cell in row.items() if key not in seconds} for row in csv.DictReader(file)]


def test_a_private_run_says_what_it_promises_and_goes_on_as_it_began(tmp_path):
    """Going on from its second round it ends the same, moving bound and noise included."""
    whole = call(*SMALL, *OWN, "hydra.run.dir=whole", cwd=tmp_path)
    assert whole.code == 0, whole.err
    promise = json.loads((tmp_path / "whole/summary.json").read_text())["privacy"]
    assert "-differentially private after 3 rounds (RDP, noise 2)" in promise
    assert promise in " ".join(whole.err.split())
    told = rows(tmp_path / "whole")
    spent = [float(row["epsilon"]) for row in told]
    assert spent == sorted(spent)
    assert spent[0] > 0
    assert all(0 <= float(row["clipped_share"]) <= 1 and float(row["update_norm"]) > 0 for row in told)
    assert len({row["clip"] for row in told}) == 3
    assert any(promise in note for note in accuracy_table(runs(tmp_path / "whole")).notes)

    assert call(*SMALL, *OWN, "rounds=2", "hydra.run.dir=two", cwd=tmp_path).code == 0
    longer = call(*SMALL, *OWN, "extend=two", "hydra.run.dir=longer", cwd=tmp_path)
    assert longer.code == 0, longer.err
    assert rows(tmp_path / "longer") == told
    calibrated = (*OWN[:1], "privacy.epsilon=40", "privacy.clip=0.05")
    assert call(*SMALL, *calibrated, "rounds=2", "hydra.run.dir=c", cwd=tmp_path).code == 0
    refused = call(*SMALL, *calibrated, "extend=c", "hydra.run.dir=d", cwd=tmp_path)
    assert (refused.code, len(refused.complaints)) == (2, 1)
    assert "extend is not for privacy.epsilon" in refused.complaints[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A private run's rows."""
    place = tmp_path_factory.mktemp("alone")
    assert call(*SMALL, *OWN, "hydra.run.dir=run", cwd=place).code == 0
    return rows(place / "run")


def test_a_run_that_was_stopped_goes_on_with_the_same_noise(alone, tmp_path):
    interrupt(tmp_path / "run", *SMALL, *OWN, after=2)
    assert len(rows(tmp_path / "run")) == 2
    assert call(*SMALL, *OWN, "hydra.run.dir=run", cwd=tmp_path).code == 0
    assert rows(tmp_path / "run") == alone


def test_in_lockstep_each_run_has_its_own_noise(alone, tmp_path):
    words = ("-m", "hydra/launcher=lockstep", "seed=42,43", "hydra.sweep.dir=.", "hydra.sweep.subdir=${seed}")
    assert call(*SMALL, *OWN, *words, cwd=tmp_path).code == 0
    assert rows(tmp_path / "42") == alone
    assert rows(tmp_path / "43") != alone


@pytest.mark.full
def test_on_two_processes_the_noise_is_that_of_one(alone, tmp_path):
    result = wait(torchrun(2, *SMALL, *OWN, "hydra.run.dir=run", cwd=tmp_path))
    assert result.code == 0, result.err
    assert rows(tmp_path / "run") == alone
