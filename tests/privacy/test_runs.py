"""Private runs as a user meets them: columns, first lines, refusals in one line, resuming and
extending.
"""

import csv
import json
import shutil
import stat

import pytest
import torch

from fedpfl.ground import tree
from fedpfl.report.load import runs
from fedpfl.report.tables import accuracy_table
from tests.command import read_checkpoint, run_command, wait_for
from tests.conftest import keep_quick
from tests.engine.test_ranks import torchrun
from tests.record.test_damage import interrupt

pytest.importorskip("dp_accounting", reason="needs the extra [privacy]")

SMALL = (
    *("dataset=digits", "clients=6", "participation=0.5", "rounds=3", "eval.every=1", "model=mlp"),
    *("local.epochs=1", "checkpoint.seconds=0", "privacy=client"),
)
OWN = (
    *("method=fedper", "privacy.noise=2", "privacy.clip=0.05", "privacy.quantile=0.5"),
    "privacy.count_noise=2",
)
SEEDED = (*OWN, "privacy.seed=1")
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
    (
        "privacy.epsilon=null privacy.noise=0 privacy.clip=null privacy.quantile=0.5",
        "privacy.clip must be a number",
    ),
    ("privacy.epsilon=null privacy.noise=-1", "privacy.noise must be"),
    ("privacy.quantile=1", "privacy.quantile must be"),
    ("privacy.count_noise=1", "privacy.count_noise must be null"),
    ("privacy.quantile=0.5 privacy.rate=0", "privacy.rate must be"),
    ("privacy.quantile=0.5 privacy.epsilon=0.5", "out of reach in 3 rounds of 3 of 6 clients"),
    ("privacy.sampling=uniform", "privacy.sampling must be"),
    ("privacy.accounting=gdp", "privacy.accounting must be"),
    ("privacy.accounting=pld", "privacy.accounting must be rdp"),
    (
        "privacy.epsilon=null privacy.noise=1 privacy.accounting=pld",
        "privacy.accounting must be rdp",
    ),
    ("privacy.sampling=poisson method=scaffold", "use fixed"),
    ("privacy.epsilon=101", "privacy.epsilon must be above 0 and at most 100"),
    ("privacy.epsilon=null privacy.noise=0.01", "protects nobody"),
    (
        "privacy.epsilon=null privacy.noise=2 privacy.quantile=0.5 privacy.count_noise=0.01",
        "protects nobody",
    ),
    ("privacy.epsilon=1e-9 privacy.quantile=0.5", "out of reach"),
    ("privacy.delta=0.9999999", "privacy.delta must be"),
    ("privacy.delta=0.2", "privacy.delta must be"),
    ("clients=20 privacy.delta=0.05", "privacy.delta must be below 1 / clients, here 0.05"),
    (
        "clients=40 unseen=0.5 privacy.delta=0.05",
        "privacy.delta must be below 1 / clients, here 0.05",
    ),
    ("clients=1 privacy.delta=1e-5", "one has nobody to be hidden among"),
    ("clients=2 unseen=0.5", "one has nobody to be hidden among"),
    ("privacy.epsilon=null privacy.noise=1e10", "privacy.noise must be between 0 and 10000"),
    (
        "privacy.quantile=0.5 privacy.count_noise=1e12",
        "privacy.count_noise must be above 0 and at most",
    ),
    ("privacy.seed=-1", "privacy.seed must be"),
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


@pytest.mark.parametrize(("words", "told"), keep_quick(LINES, 4))
def test_a_bad_configuration_is_one_line(words, told, tmp_path):
    given = words.split()
    method = [] if any(word.startswith("method=") for word in given) else ["method=fedavg"]
    epsilon = (
        [] if any(word.startswith("privacy.epsilon=") for word in given) else ["privacy.epsilon=8"]
    )
    result = run_command(*SMALL, *method, *epsilon, *given, "hydra.run.dir=run", cwd=tmp_path)
    assert result.code == 2
    assert len(result.complaints) == 1, result.err
    assert told in result.complaints[0]
    assert not (tmp_path / "run/rounds.csv").exists()


def rows(path):
    with open(path / "rounds.csv") as file:
        seconds = ("seconds", "eval_seconds")
        return [
            {key: cell for key, cell in row.items() if key not in seconds}
            for row in csv.DictReader(file)
        ]


def test_a_private_run_says_what_it_promises_and_goes_on_as_it_began(tmp_path):
    """Going on from its second round it gives away as much, by noise of its own."""
    whole = run_command(*SMALL, *OWN, "hydra.run.dir=whole", cwd=tmp_path)
    assert whole.code == 0, whole.err
    promise = json.loads((tmp_path / "whole/summary.json").read_text())["privacy"]
    assert "-differentially private after 3 rounds (RDP, noise 2)" in promise
    assert promise in " ".join(whole.err.split())
    told = rows(tmp_path / "whole")
    spent = [float(row["epsilon"]) for row in told]
    assert spent == sorted(spent)
    assert spent[0] > 0
    assert all(
        0 <= float(row["clipped_share"]) <= 1 and float(row["update_norm"]) > 0 for row in told
    )
    assert len({row["clip"] for row in told}) == 3
    assert any(promise in note for note in accuracy_table(runs(tmp_path / "whole")).notes)

    assert run_command(*SMALL, *OWN, "rounds=2", "hydra.run.dir=two", cwd=tmp_path).code == 0
    longer = run_command(*SMALL, *OWN, "extend=two", "hydra.run.dir=longer", cwd=tmp_path)
    assert longer.code == 0, longer.err
    told_longer, told_two = rows(tmp_path / "longer"), rows(tmp_path / "two")
    assert told_longer[:2] == told_two
    assert told_longer[2] != told[2]
    assert [row["epsilon"] for row in told_longer] == [row["epsilon"] for row in told]
    calibrated = (*OWN[:1], "privacy.epsilon=40", "privacy.clip=0.05")
    assert run_command(*SMALL, *calibrated, "rounds=2", "hydra.run.dir=c", cwd=tmp_path).code == 0
    refused = run_command(*SMALL, *calibrated, "extend=c", "hydra.run.dir=d", cwd=tmp_path)
    assert (refused.code, len(refused.complaints)) == (2, 1)
    assert "extend is not for privacy.epsilon" in refused.complaints[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A private run's rows."""
    place = tmp_path_factory.mktemp("alone")
    assert run_command(*SMALL, *SEEDED, "hydra.run.dir=run", cwd=place).code == 0
    return rows(place / "run")


@pytest.mark.full
def test_a_run_that_was_stopped_goes_on_with_the_same_noise(alone, tmp_path):
    interrupt(tmp_path / "run", *SMALL, *SEEDED, after=2)
    assert len(rows(tmp_path / "run")) == 2
    result = run_command(*SMALL, *SEEDED, "hydra.run.dir=run", cwd=tmp_path)
    assert result.code == 0
    assert "no guarantee: whoever knows privacy.seed can take the noise off" in result.err
    assert rows(tmp_path / "run") == alone


def test_a_secret_is_the_runs_alone_and_goes_on_with_it(tmp_path):
    """Two copies of a run that was stopped end alike, by noise that no other run has."""
    interrupt(tmp_path / "run", *SMALL, *OWN, after=2)
    key = tmp_path / "run/privacy.key"
    secret = key.read_bytes()
    assert len(secret) == 32
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    for path in (tmp_path / "run").iterdir():
        content = path.read_bytes()
        assert path == key or not (secret in content or secret.hex().encode() in content), path
    for copy in ("copy", "lost", "other"):
        shutil.copytree(tmp_path / "run", tmp_path / copy)
    (tmp_path / "lost/privacy.key").unlink()
    (tmp_path / "other/privacy.key").write_bytes(secret[::-1])
    for broken in ("lost", "other"):
        before = {
            path.name: path.read_bytes()
            for path in (tmp_path / broken).iterdir()
            if path.name != "run.log"
        }
        result = run_command(*SMALL, *OWN, f"hydra.run.dir={broken}", cwd=tmp_path)
        assert (result.code, len(result.complaints)) == (2, 1)
        assert "privacy.key is not what the run began with" in result.complaints[0]
        after = {
            path.name: path.read_bytes()
            for path in (tmp_path / broken).iterdir()
            if path.name != "run.log"
        }
        assert after["state.pt"] == before["state.pt"]
    for run in ("run", "copy", "anew"):
        assert run_command(*SMALL, *OWN, f"hydra.run.dir={run}", cwd=tmp_path).code == 0
        assert not (tmp_path / run / "privacy.key").exists()
    assert rows(tmp_path / "run") == rows(tmp_path / "copy")
    assert rows(tmp_path / "run")[0] != rows(tmp_path / "anew")[0]
    assert run_command(*SMALL, *OWN, "hydra.run.dir=lost", "restart=true", cwd=tmp_path).code == 0


@pytest.mark.full
@pytest.mark.parametrize("seeded", [(), ("privacy.seed=1",)], ids=["secret", "seeded"])
def test_the_difference_of_two_runs_of_a_sweep_keeps_the_noise_of_both(seeded, tmp_path):
    """Clients do not move at these rates, so that it is noise alone: of twice the variance, not
    nothing.
    """
    words = (
        *("method=fedavg", "privacy.noise=2", "privacy.clip=0.05", "rounds=1", "-m"),
        "local.lr=1e-30,2e-30",
    )
    assert (
        run_command(
            *SMALL,
            *words,
            *seeded,
            "hydra.sweep.dir=.",
            "hydra.sweep.subdir=${local.lr}",
            cwd=tmp_path,
        ).code
        == 0
    )
    servers = [read_checkpoint(tmp_path / rate)["server"] for rate in ("1e-30", "2e-30")]
    difference = tree.ravel(tree.map(torch.sub, *servers)).double()
    assert float(difference.std()) == pytest.approx(2**0.5 * 2 * 0.05 / 3, rel=0.02)


def test_cohorts_are_secret_too(tmp_path):
    """Whoever knows the seed does not know who took part, of which the guarantee makes use."""
    words = (*SMALL, "method=fedavg", "rounds=1", "clients=30", "participation=0.3")
    private = ("privacy.noise=2", "privacy.clip=0.05")
    cohorts = []
    for name, more in (
        ("one", private),
        ("two", private),
        ("loud", ("privacy.noise=0",)),
        ("none", ("privacy=none",)),
    ):
        assert run_command(*words, *more, f"hydra.run.dir={name}", cwd=tmp_path).code == 0
        cohorts.append(
            sorted(
                int(who)
                for block in read_checkpoint(tmp_path / name)["rows"]
                for who in block["who"]
            )
        )
    one, two, loud, none = cohorts
    assert len(one) == len(two) == 9
    assert one not in (two, none)
    assert two != none
    assert loud == none


def test_a_round_without_anybody_is_a_round(tmp_path):
    """To draw again, or to refuse, would tell of who is there. Six clients of a sixth each are
    often nobody.
    """
    words = (
        *("method=fedper", "privacy.noise=2", "privacy.clip=0.05", "privacy.quantile=0.5"),
        "privacy.count_noise=3",
    )
    rare = (
        *("privacy.sampling=poisson", "participation=0.17", "rounds=12", "eval.every=6"),
        "privacy.seed=3",
    )
    result = run_command(*SMALL, *words, *rare, "hydra.run.dir=run", cwd=tmp_path)
    assert result.code == 0, result.err
    told = rows(tmp_path / "run")
    counts = [int(row["participants"]) for row in told]
    assert len(counts) == 12
    assert 0 in counts
    assert any(counts)
    empty = told[counts.index(0)]
    assert (empty["train_loss"], empty["values_down"], empty["clipped_share"]) == ("", "0", "")
    assert [float(row["epsilon"]) for row in told] == sorted(float(row["epsilon"]) for row in told)


def test_in_lockstep_each_run_has_its_own_noise(alone, tmp_path):
    words = (
        *("-m", "hydra/launcher=lockstep", "seed=42,43", "hydra.sweep.dir=."),
        "hydra.sweep.subdir=${seed}",
    )
    assert run_command(*SMALL, *SEEDED, *words, cwd=tmp_path).code == 0
    assert rows(tmp_path / "42") == alone
    assert rows(tmp_path / "43") != alone


@pytest.mark.full
def test_on_two_processes_the_noise_is_that_of_one(alone, tmp_path):
    result = wait_for(torchrun(2, *SMALL, *SEEDED, "hydra.run.dir=run", cwd=tmp_path))
    assert result.code == 0, result.err
    assert rows(tmp_path / "run") == alone
    result = wait_for(
        torchrun(2, *SMALL, *OWN, "hydra.run.dir=secret", cwd=tmp_path)
    )  # they stop where servers differ
    assert result.code == 0, result.err
    assert rows(tmp_path / "secret") != alone
