"""Private runs as a user meets them: columns, first lines, refusals in one line, resuming and
extending.
"""

import json
import shutil
import stat

import pytest

from fedpfl.ground.errors import FedpflError
from fedpfl.report.load import runs
from fedpfl.report.tables import accuracy_table
from tests.command import (
    assert_refused,
    format_override,
    play_rows,
    play_run,
    read_checkpoint,
    read_table,
    run_command,
    wait_for,
)
from tests.conftest import keep_quick, read_cases
from tests.engine.test_ranks import torchrun
from tests.record.test_damage import interrupt

pytest.importorskip("dp_accounting", reason="needs the extra [privacy]")

SMALL = (
    *("dataset=digits", "clients=6", "participation=0.5", "rounds=3", "eval.every=1", "model=mlp"),
    *("model.hidden=[8]", "local.epochs=1", "checkpoint.seconds=0", "privacy=client"),
)
OWN = (
    *("method=fedper", "privacy.noise=2", "privacy.clip=0.05", "privacy.quantile=0.5"),
    "privacy.count_noise=2",
)
SEEDED = (*OWN, "privacy.seed=1")
LINES = """
method=fedobp method.q=0.9 | its server would see what clients keep, not a mean of uploads
method=fedproto | its server would see each client's upload, not a mean of uploads
method=pfedfda | nobody knows what an upload without training would be
method=local_only | send nothing up
privacy.epsilon=null | privacy.epsilon must be given, or else noise
privacy.delta=0 | privacy.delta must be
privacy.clip=0 | privacy.clip must be
privacy.clip=null | privacy.clip must be a number where there is noise
privacy.quantile=1 | privacy.quantile must be
privacy.count_noise=1 | privacy.count_noise must be null
privacy.quantile=0.5 privacy.rate=0 | privacy.rate must be
privacy.quantile=0.5 privacy.epsilon=0.5 | out of reach in 3 rounds of 3 of 6 clients
privacy.sampling=uniform | privacy.sampling must be
privacy.accounting=pld | privacy.accounting must be rdp
privacy.sampling=poisson method=scaffold | use fixed
privacy.epsilon=101 | privacy.epsilon must be above 0 and at most 100
privacy.epsilon=null privacy.noise=0.01 | protects nobody
clients=40 unseen=0.5 privacy.delta=0.05 | privacy.delta must be below 1 / clients, here 0.05
clients=20 privacy.delta=0.05 | privacy.delta must be below 1 / clients, here 0.05
clients=1 privacy.delta=1e-5 | one has nobody to be hidden among
privacy.epsilon=null privacy.noise=1e10 | privacy.noise must be between 0 and 10000
privacy.seed=-1 | privacy.seed must be
stopping.early=true | stopping.early would tell the server
system=simulated | use system=none
validation=0.2 | use validation=0
model=resnet8 model.norm=batch dataset=digits | method.statistics=local
"""
"""Words | what is said."""


@pytest.mark.parametrize(("text", "told"), keep_quick(read_cases(LINES, " | "), 4))
def test_a_bad_configuration_is_one_line(text, told, tmp_path):
    given = text.split()
    usual = {"method": "fedavg", "privacy.epsilon": "8"}
    keys = {word.partition("=")[0] for word in given}
    more = [f"{key}={value}" for key, value in usual.items() if key not in keys]
    small = [word for word in SMALL if not ("model" in keys and word.startswith("model."))]
    assert_refused(tmp_path / "run", told, *small, *more, *given)


def rows(path):
    return read_table(path / "rounds.csv")


def play(folder, *words):
    """Play a run of these words; returns its rows and what it says."""
    told = play_run(folder, *SMALL, *words)
    return rows(folder), told


def test_a_private_run_says_what_it_promises_and_goes_on_as_it_began(tmp_path):
    """Going on from its second round it gives away as much, by noise of its own."""
    found, said = play(tmp_path / "whole", *OWN)
    promise = json.loads((tmp_path / "whole/summary.json").read_text())["privacy"]
    assert "-differentially private after 3 rounds (RDP, noise 2)" in promise
    assert promise in " ".join(said.split())
    spent = [float(row["epsilon"]) for row in found]
    assert spent == sorted(spent)
    assert spent[0] > 0
    for row in found:
        assert 0 <= float(row["clipped_share"]) <= 1 < 1 + float(row["update_norm"])
    assert len({row["clip"] for row in found}) == 3
    assert any(promise in note for note in accuracy_table(runs(tmp_path / "whole")).notes)

    two, _ = play(tmp_path / "two", *OWN, "rounds=2")
    word = format_override("extend", tmp_path / "two")
    longer, _ = play(tmp_path / "longer", *OWN, word)
    assert longer[:2] == two
    assert longer[2] != found[2]
    assert [row["epsilon"] for row in longer] == [row["epsilon"] for row in found]
    with pytest.raises(FedpflError, match=r"extend is not for privacy\.epsilon"):
        # Of everybody, whose noise is found at once
        play(tmp_path / "d", OWN[0], "privacy.epsilon=40", "participation=1", word)


@pytest.fixture(scope="module", params=keep_quick(["samples", "clients"]))
def words(request):
    """The words of a run whose noise is seeded."""
    if request.param == "clients":
        return (*SMALL, *SEEDED)
    return (*SMALL, "method=fedper", "privacy=sample", "privacy.noise=2", "privacy.seed=1")


@pytest.fixture(scope="module")
def alone(words, tmp_path_factory):
    """The rows of that run, which other ways to play it must come to."""
    return play_rows(tmp_path_factory.mktemp("alone") / "run", *words)


def test_a_run_that_was_stopped_goes_on_with_the_same_noise(words, alone, tmp_path):
    interrupt(tmp_path / "run", *words, after=2)
    assert len(rows(tmp_path / "run")) == 2
    said = play_run(tmp_path / "run", *words)
    assert "no guarantee: whoever knows privacy.seed can take the noise off" in said
    assert rows(tmp_path / "run") == alone


def test_in_lockstep_each_run_has_its_own_noise(words, alone, tmp_path):
    sweep = ("-m", "hydra/launcher=lockstep", "seed=42,43", "hydra.sweep.dir=.")
    result = run_command(*words, *sweep, "hydra.sweep.subdir=${seed}", cwd=tmp_path)
    assert result.code == 0
    assert rows(tmp_path / "42") == alone
    assert rows(tmp_path / "43") != alone


@pytest.mark.full
def test_on_two_processes_the_noise_is_that_of_one(words, alone, tmp_path):
    result = wait_for(torchrun(2, *words, "hydra.run.dir=run", cwd=tmp_path))
    assert result.code == 0, result.err
    assert rows(tmp_path / "run") == alone
    unseeded = [word for word in words if not word.startswith("privacy.seed")]
    result = wait_for(torchrun(2, *unseeded, "hydra.run.dir=secret", cwd=tmp_path))
    assert result.code == 0, result.err  # they would stop where servers differ
    assert rows(tmp_path / "secret") != alone


def test_a_secret_is_the_runs_alone_and_goes_on_with_it(tmp_path):
    """Two copies of a run that was stopped end alike, by noise that no other run has."""
    run = tmp_path / "run"
    interrupt(run, *SMALL, *OWN, after=2)
    secret = (run / "privacy.key").read_bytes()
    assert len(secret) == 32
    assert stat.S_IMODE((run / "privacy.key").stat().st_mode) == 0o600
    for path in run.iterdir():
        content = path.read_bytes()
        is_key = path.name == "privacy.key"
        assert is_key or not (secret in content or secret.hex().encode() in content), path
    for name in ("copy", "lost", "other"):
        shutil.copytree(run, tmp_path / name)
    (tmp_path / "lost/privacy.key").unlink()
    (tmp_path / "other/privacy.key").write_bytes(secret[::-1])
    for broken in (tmp_path / "lost", tmp_path / "other"):
        before = (broken / "state.pt").read_bytes()
        with pytest.raises(FedpflError, match=r"privacy\.key is not what the run began with"):
            play(broken, *OWN)
        assert (broken / "state.pt").read_bytes() == before
    one, same, other = (play(tmp_path / name, *OWN)[0] for name in ("run", "copy", "anew"))
    assert not list(tmp_path.glob("*[ywn]/privacy.key"))
    assert one == same
    assert one[0] != other[0]
    play(tmp_path / "lost", *OWN, "restart=true")


def test_cohorts_are_secret_too(tmp_path):
    """Whoever knows the seed does not know who took part, of which the guarantee makes use."""
    words = (*SMALL, "method=fedavg", "rounds=1", "clients=30", "participation=0.3")
    private = ("privacy.noise=2", "privacy.clip=0.05")
    cases = {
        **dict.fromkeys(("one", "two"), private),
        "loud": ("privacy.noise=0",),
        "none": ("privacy=none",),
    }
    cohorts = []
    for name, more in cases.items():
        play_run(tmp_path / name, *words, *more)
        blocks = read_checkpoint(tmp_path / name)["rows"]
        cohorts.append(sorted(int(who) for block in blocks for who in block["who"]))
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
        *("privacy.seed=3", "local.lr=0.001"),
    )
    told, _ = play(tmp_path / "run", *words, *rare)
    counts = [int(row["participants"]) for row in told]
    assert len(counts) == 12
    assert 0 in counts
    assert any(counts)
    empty = told[counts.index(0)]
    assert (empty["train_loss"], empty["values_down"], empty["clipped_share"]) == ("", "0", "")
    assert [float(row["epsilon"]) for row in told] == sorted(float(row["epsilon"]) for row in told)
