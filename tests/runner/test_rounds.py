"""`fedpfl.rounds` and callbacks: a run from outside while it goes on."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import fedpfl
from fedpfl.ground import lock
from fedpfl.ground.errors import FedpflError
from fedpfl.record.rounds import format_cell
from tests.command import CLOCKED, TINY_TASK, play_run, read_summary, read_table
from tests.conftest import assert_same, keep_quick
from tests.record.test_damage import assert_ends_as

WORDS = (
    *TINY_TASK,
    *("rounds=4", "eval.every=2", "checkpoint.seconds=1000", "model=mlp", "method=fedobp"),
    "model.hidden=[16]",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of the command's; tests read it."""
    path = tmp_path_factory.mktemp("rounds") / "run"
    play_run(path, *WORDS)
    return path


def test_rounds_are_those_of_the_file(whole, tmp_path, capfd):
    rows, judged = [], []
    for round in fedpfl.rounds(*WORDS, directory=tmp_path / "run"):
        named = round.row.items()
        rows.append({key: format_cell(value) for key, value in named if key not in CLOCKED})
        judged.append(round.clients.get("accuracy"))
        assert read_table(tmp_path / "run/rounds.csv") == rows  # written before it is handed on
        last = round
    assert rows == read_table(whole / "rounds.csv")
    assert judged[0] is judged[2] is None
    loaded = fedpfl.load(whole)
    assert list(judged[3].values()) == loaded.clients["accuracy"].tolist()
    for client in range(4):
        assert_same(last.personal(client), loaded.personal(client))
    assert_same(last.mask(2), loaded.mask(2))
    assert_ends_as(tmp_path / "run", whole)
    assert capfd.readouterr() == ("", "")
    assert list(fedpfl.rounds(*WORDS, directory=tmp_path / "run")) == []  # it is finished


def test_the_last_round_is_judged_whenever_it_comes(tmp_path):
    began = time.monotonic()
    words = (*WORDS[:-1], "rounds=3", "method=fedavg")
    played = list(fedpfl.rounds(*words, directory=tmp_path / "run"))
    assert [round.is_evaluated for round in played] == [False, True, True]
    assert [round.is_last for round in played] == [False, False, True]
    spent = [round.row["seconds"] + (round.row["eval_seconds"] or 0) for round in played]
    assert 0 < min(spent) < sum(spent) < time.monotonic() - began


def test_of_equal_rounds_the_first_is_the_best(tmp_path):
    play_run(tmp_path / "run", *WORDS[:-2], "model.hidden=[4]", "method=fedavg", "local.lr=1e-30")
    assert fedpfl.load(tmp_path / "run").rounds["accuracy"].dropna().nunique() == 1
    told = read_summary(tmp_path / "run")
    assert (told["best"]["round"], told["last"]["round"]) == (2, 4)


def test_models_go_when_the_next_round_begins(tmp_path):
    rounds = fedpfl.rounds(*WORDS, directory=tmp_path / "run")
    first = next(rounds)
    first.personal(0)
    next(rounds)
    message = "round 1 is over, and its models with it: ask before the next round"
    with pytest.raises(FedpflError, match=message):
        first.personal(0)
    rounds.close()


def test_runs_in_several_threads_take_turns(whole, tmp_path):
    def train(seed):
        return fedpfl.run(*WORDS, f"seed={seed}", directory=tmp_path / str(seed), progress=False)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(train, (1, 2, 42)))
    assert_ends_as(tmp_path / "42", whole)


class Heard(fedpfl.Callback):
    """Writes down its calls, and fails where told."""

    def __init__(self, fails: str = ""):
        self.calls, self.notes, self._fails = [], [], fails

    def _call(self, *what: object) -> None:
        self.calls.append(what)
        if what[0] == self._fails:
            raise SystemExit("no\nluck") if what[0] == "round" else ZeroDivisionError("no\nluck")

    def on_begin(self, run):
        self._call("begin", run.path, run.config["method"]["name"], run.rounds, run.start_round)

    def on_round(self, round):
        self._call("round", round.row["round"], sorted(round.clients)[:1], len(round.personal(0)))

    def on_evaluation(self, round):
        self._call("evaluation", round)

    def on_note(self, text):
        self.notes.append(text)

    def on_end(self, status, summary):
        self._call("end", status, summary.get("rounds_played"))


class Spoils(fedpfl.Callback):
    """Changes its arguments."""

    def on_begin(self, run):
        run.config.clear()

    def on_round(self, round):
        round.row.clear()


def test_who_leaves_the_loop_can_go_on_and_callbacks_decide_nothing(whole, tmp_path):
    run, heard = tmp_path / "run", Heard()
    for round in fedpfl.rounds(*WORDS, directory=run, callbacks=[heard, Spoils()]):
        assert heard.calls[-1][:2] == ("round", round.state.round)  # they hear first
        if round.state.round == 2:
            there = round.personal(1)
            break
    half = fedpfl.load(run)
    assert (half.status, half.round, len(half.rounds)) == ("interrupted", 2, 2)
    assert_same(half.personal(1), there)
    os.close(lock.acquire_lock(run))  # nobody holds it
    assert (run / "run.log").read_text().endswith(" interrupted\n")
    fedpfl.run(*WORDS, directory=run, progress=False, callbacks=[heard, Spoils()])
    entries = len(fedpfl.load(run).personal(0))
    assert heard.calls == [
        ("begin", run, "fedobp", 4, 0),
        ("round", 1, [], entries),
        ("evaluation", 2),
        ("round", 2, ["accuracy"], entries),
        ("end", "interrupted", None),
        ("begin", run, "fedobp", 4, 2),
        ("round", 3, [], entries),
        ("evaluation", 4),
        ("round", 4, ["accuracy"], entries),
        ("end", "finished", 4),
    ]
    assert_ends_as(run, whole)


@pytest.mark.parametrize("fails", keep_quick(["round", "begin", "evaluation", "end"]))
def test_a_callback_that_fails_is_named_once_and_left_out(fails, whole, tmp_path):
    good, bad = Heard(), Heard(fails)
    fedpfl.run(*WORDS, directory=tmp_path / "run", progress=False, callbacks=[good, bad])
    assert [what[0] for what in bad.calls].count(fails) == 1
    assert [what[0] for what in bad.calls].count("end") == 1
    told = ["begin", *["round", "evaluation", "round"] * 2, "end"]
    assert [what[0] for what in good.calls] == told
    log = (tmp_path / "run" / "run.log").read_text()
    reason = "SystemExit: no luck" if fails == "round" else "no luck"
    assert log.count(f"Heard failed and is left out, the run goes on: {reason}") == 1
    assert_ends_as(tmp_path / "run", whole)
