"""Runs with hostile clients as a user meets them: who is evaluated, refusals in one line, resuming."""

import itertools

import pytest

from fedpfl.report.load import runs
from fedpfl.report.tables import accuracy_table
from tests.command import assert_refused, play_rows, read_checkpoint, read_summary, read_table
from tests.conftest import assert_same, keep_quick, read_cases
from tests.record.test_damage import interrupt

SMALL = (
    *("dataset=digits", "clients=10", "participation=0.7", "rounds=2", "eval.every=1"),
    *("model=mlp", "model.hidden=[8]", "local.epochs=1", "checkpoint.seconds=0"),
)
LINES = """
attack=label_flip attack.share=1 | attack.share must be at least 0 and below 1
attack=backdoor attack.from_round=3 | none of its 1 clients is drawn in a round of the attack, from attack.from_round=3 to rounds=2
attack=backdoor eval.common=true | honest clients alone
attack=sign_flip method=fedamp | nobody knows what an upload without training would be; choose
defence=krum method=fedfomo | the server of method=fedfomo sees more
defence=bulyan defence.f=2 | needs 11 uploads in every round, and a cohort is 7 clients
defence=median method=fedproto | replaces a mean of uploads, and the server of method=fedproto sees more
defence=krum system=simulated | needs 5 uploads in every round, and a round with system=simulated or stopping.early may have fewer
defence=median privacy=client privacy.noise=1 | privacy=client accounts for a mean of uploads alone
defence=median model=resnet8 model.norm=batch | method.statistics=local
"""
"""Words | what is said."""


@pytest.mark.parametrize(("text", "message"), keep_quick(read_cases(LINES, " | "), 4))
def test_a_bad_configuration_is_one_line(text, message, tmp_path):
    method = () if "method=" in text else ("method=fedavg",)
    assert_refused(tmp_path / "run", message, *small_run(text.split()), *method, *text.split())


def small_run(words):
    """Return the words of a small run, but for its network's where there is another."""
    has_network = any(word.startswith("model=") for word in words)
    return [word for word in SMALL if not (has_network and word.startswith("model"))]


def play(folder, *words):
    """Play a small run of these words, and return its rows."""
    return play_rows(folder, *small_run(words), *words)


def read_models(folder):
    """Return the states of a run's last checkpoint."""
    checkpoint = read_checkpoint(folder)
    return {name: checkpoint[name] for name in ("server", "rows")}


ATTACKED = (
    *("method=fedper", "attack=replacement", "attack.share=0.3", "attack.from_round=2"),
    *("defence=trimmed_mean", "eval.finetune_epochs=1"),
)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """A run under attack, from its second round on."""
    folder = tmp_path_factory.mktemp("attacked") / "run"
    play(folder, *ATTACKED)
    return folder


def test_nobody_and_the_mean_are_the_run_without(tmp_path):
    plain = play(tmp_path / "plain", "method=fedper")
    folder = tmp_path / "backdoor"
    found = play(folder, "method=fedper", "attack=backdoor", "attack.share=0", "defence=mean")
    assert "asr" in found[0]
    for row, expected in zip(found, plain, strict=True):
        assert {name: row[name] for name in expected} == expected
    assert_same(*map(read_models, (folder, tmp_path / "plain")))


def test_the_honest_alone_are_evaluated_and_a_table_says_who_attacks(attacked):
    attackers = read_summary(attacked)["attackers"]
    assert len(attackers) == 3
    clients = read_table(attacked / "clients.csv")
    assert [int(row["client"]) for row in clients if row["attacker"] == "1"] == attackers
    last = read_table(attacked / "rounds.csv")[-1]
    for name in ("accuracy", "ft_accuracy", "asr", "ft_asr"):
        values = []
        for row in clients:
            is_judged = row["attacker"] == "0" and int(row["test"]) > 0
            assert row[name] == "" or is_judged
            if row[name]:
                values.append(float(row[name]))
        assert sum(values) / len(values) == pytest.approx(float(last[name]))
        if name == "asr":
            assert float(last["asr_worst10"]) == max(values)
    table = accuracy_table(runs(attacked))
    assert any("3 of 10 clients attack, and the others alone" in note for note in table.notes)
    assert {"asr", "ft_asr"} <= {*table.frame}


TWO_CLASSES = """
method=knn_per method.lam=null
method=ditto model=lenet5
method=pfedfda eval.classes=own
"""
"""Words of methods, of which some look at validation samples before they answer."""


@pytest.mark.parametrize("text", keep_quick(TWO_CLASSES.strip().splitlines(), 1))
def test_of_two_classes_success_is_what_accuracy_lacks(text, tmp_path):
    """Where labels alone are flipped: the models answer as they do without an attack."""
    words = ("dataset.only=[3,8]", "attack=label_flip", "attack.share=0.3", "local.lr=0.001")
    words += ("validation=0.3", "unseen=0.2", "eval.finetune_epochs=1")
    last = play(tmp_path / "run", *words, *text.split())[-1]
    accuracies, prefixes = [], ("", "ft_", "unseen_", "unseen_ft_")
    for prefix, statistic in itertools.product(prefixes, ("", "_pooled", "_worst10")):
        accuracy = float(last[f"{prefix}accuracy{statistic}"])
        assert float(last[f"{prefix}asr{statistic}"]) == pytest.approx(100 - accuracy)
        accuracies.append(accuracy)
    assert min(accuracies) < 100


def test_before_its_first_round_an_attack_is_none_and_a_stopped_run_goes_on(attacked, tmp_path):
    """Bit for bit; stopped with the second row, before the second checkpoint."""
    interrupt(tmp_path / "run", *SMALL, *ATTACKED, after=2)
    play(tmp_path / "honest", "method=fedper", "defence=trimmed_mean", "rounds=1")
    before, honest = (read_checkpoint(tmp_path / name) for name in ("run", "honest"))
    assert before["round"] == honest["round"] == 1
    assert_same(before["server"], honest["server"])
    assert play(tmp_path / "run", *ATTACKED) == read_table(attacked / "rounds.csv")
    assert_same(*map(read_models, (tmp_path / "run", attacked)))


COMBINATIONS = """
method=fedavg attack=backdoor attack.share=0.2 unseen=0.2 validation=0.2 eval.finetune_epochs=1 defence=median => unseen_ft_asr
method=fedavg attack=lie attack.share=0.3 privacy=client privacy.noise=2 privacy.seed=1 => epsilon
method=fedproto attack=backdoor attack.share=0.2 attack.parts=2 eval.classes=own => asr_pooled
"""
"""Words => a column that has a number in the last row."""


@pytest.mark.parametrize(("text", "column"), keep_quick(read_cases(COMBINATIONS)))
def test_attacks_and_defences_go_with_what_else_there_is(text, column, tmp_path):
    if "privacy" in text:
        pytest.importorskip("dp_accounting", reason="needs the extra [privacy]")
    last = play(tmp_path / "run", *text.split())[-1]
    assert float(last[column]) >= 0
    assert not any(name.startswith("val_asr") for name in last)


@pytest.mark.full
def test_what_is_known_of_backdoors(tmp_path):
    """A trained backdoor succeeds with FedAvg, hardly with a head of one's own (Qin et al., KDD
    2023); a replaced model takes the mean and not the median; without attackers there is none.
    """
    training = ("participation=1", "rounds=12", "eval.every=12", "local.epochs=3", "local.lr=0.05")
    words = (*training, "model=mlp", "partition.alpha=0.3")
    cases = {
        "clean": ("method=fedavg", "attack=backdoor", "attack.share=0"),
        "shared": ("method=fedavg", "attack=backdoor", "attack.share=0.2"),
        "head": ("method=fedper", "attack=backdoor", "attack.share=0.2"),
        "replaced": ("method=fedavg", "attack=replacement"),
        "median": ("method=fedavg", "attack=replacement", "defence=median"),
    }
    asr, accuracy = {}, {}
    for name, more in cases.items():
        last = play(tmp_path / name, *words, *more)[-1]
        asr[name], accuracy[name] = float(last["asr"]), float(last["accuracy"])
    assert asr["clean"] < 5
    assert asr["shared"] > 50 > 20 > asr["head"]
    assert asr["replaced"] > 50 > 5 > asr["median"]
    assert min(accuracy.values()) > 80
