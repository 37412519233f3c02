"""Private runs as a user meets them: columns, first lines, refusals in one line, resuming and
extending.
"""

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
    read_summary,
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
NOISED = ("method=fedper", "privacy.noise=2", "privacy.clip=0.05")
OWN = (*NOISED, "privacy.quantile=0.5", "privacy.count_noise=2")
SAMPLES = (*SMALL, "method=fedper", "privacy=sample")
LINES = """
method=fedobp method.q=0.9 | its server sees client states, and only a mean of uploads
method=fedproto | its server sees each upload, and only a mean of uploads
method=pfedfda | nobody knows what an upload without training would be
privacy.epsilon=null | privacy.epsilon must be given, or else noise
privacy.epsilon=null privacy.noise=0.01 | protects nobody
clients=40 unseen=0.5 privacy.delta=0.05 | privacy.delta must be below 1 / clients, here 0.05
model=resnet8 model.norm=batch | method.statistics=local
"""
"""Words of a run that hides clients | what is said."""
LINES_OF_SAMPLES = """
model=resnet8 model.norm=batch | statistics of samples in buffers
privacy.noise=null privacy.epsilon=1e-9 privacy.delta=1e-9 | out of reach by any noise
privacy.delta=0.05 | privacy.delta must be below 1 / samples
unseen=0.4 eval.finetune_epochs=1 | no account of newcomers that are fine-tuned
"""
CASES = [
    *keep_quick([("client", *line) for line in read_cases(LINES, " | ")], 4),
    *keep_quick([("sample", *line) for line in read_cases(LINES_OF_SAMPLES, " | ")], 4),
]


@pytest.mark.parametrize(("hidden", "text", "told"), CASES)
def test_a_bad_configuration_is_one_line(hidden, text, told, tmp_path):
    usual = ["method=fedavg", "privacy.epsilon=8"]
    if hidden == "sample":
        usual = ["method=fedper", "privacy.noise=2", "privacy.clip=0.5"]
    given = text.split()
    keys = {word.partition("=")[0] for word in given}
    left = {"model.hidden"} if "model" in keys else set()
    words = (*SMALL, f"privacy={hidden}", *usual)
    kept = [word for word in words if word.partition("=")[0] not in keys | left]
    assert_refused(tmp_path / "run", told, *kept, *given)


def rows(path):
    return read_table(path / "rounds.csv")


def play(folder, *words):
    """Play a run of these words; returns its rows and what it says."""
    told = play_run(folder, *SMALL, *words)
    return rows(folder), told


def test_a_run_says_what_each_clients_samples_give_away(tmp_path):
    tuned = ("eval.finetune_epochs=1", "eval.finetune_every=3", "privacy.epsilon=5", "clients=3")
    found, said = play(tmp_path / "run", *SAMPLES, *tuned)
    summary = read_summary(tmp_path / "run")
    promise = summary["privacy"]
    assert "each client's models are (5, " in promise
    assert summary["heterogeneity"]["label_skew"] is None
    assert "label skew" not in said
    assert promise in " ".join(said.split())
    assert any(promise in note for note in accuracy_table(runs(tmp_path / "run")).notes)
    assert all(row["train_loss"] == "" and row["accuracy"] for row in found)
    clients = read_table(tmp_path / "run/clients.csv")
    assert not [name for name in clients[0] if name.startswith("label_")]
    epsilons = [float(row["epsilon"]) for row in clients]
    assert max(epsilons) == float(found[-1]["epsilon"])
    assert all(4.9 < epsilon <= 5 for epsilon in epsilons)  # all are fine-tuned in the end


def test_a_private_run_says_what_it_promises_and_goes_on_as_it_began(tmp_path):
    """Going on from its second round it gives away as much, by noise of its own."""
    found, said = play(tmp_path / "whole", *OWN)
    promise = read_summary(tmp_path / "whole")["privacy"]
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
        return (*SMALL, *OWN, "privacy.seed=1")
    return (*SAMPLES, "privacy.noise=2", "privacy.seed=1")


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
    one, same = (play(tmp_path / name, *OWN)[0] for name in ("run", "copy"))
    anew, _ = play(tmp_path / "lost", *OWN, "restart=true")
    assert [path.parent.name for path in tmp_path.glob("*/privacy.key")] == ["other"]
    assert one == same
    assert one[0] != anew[0]


def test_cohorts_are_secret_too(tmp_path):
    """Whoever knows the seed does not know who took part, of which the guarantee makes use."""
    words = (*SMALL, "method=fedper", "rounds=1", "clients=30", "participation=0.3")
    loud, none = ("privacy.noise=0",), ("privacy=none",)
    cases, cohorts = {"one": NOISED, "two": NOISED, "loud": loud, "none": none}, {}
    for name, more in cases.items():
        play_run(tmp_path / name, *words, *more)
        blocks = read_checkpoint(tmp_path / name)["rows"]
        cohorts[name] = sorted(int(who) for block in blocks for who in block["who"])
    assert {len(cohort) for cohort in cohorts.values()} == {9}
    assert cohorts["loud"] == cohorts["none"]
    assert len({*map(tuple, cohorts.values())}) == 3
