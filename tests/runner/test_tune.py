"""The search for hyperparameters: proposals, what they are judged by, kills."""

import functools
import itertools
import json
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from fedpfl import tune
from fedpfl.config.plan import check_config
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS
from fedpfl.report.tables import best_round
from fedpfl.runner import spaces, trials, tuning
from fedpfl.runner.faults import TrialPruned
from fedpfl.runner.optuna_study import parse_distribution
from fedpfl.runner.search import Search, SearchResult, SearchSettings
from tests.command import (
    call_main,
    compose_once,
    format_override,
    keep_last_words,
    rewrite_summary,
)
from tests.conftest import keep_quick, read_cases

optuna = pytest.importorskip("optuna")
WORDS = (
    "local.lr=tag(log,interval(0.001,0.1))",
    "method.mu=choice(0.01,0.1,1)",
    "rounds=range(1,10,2)",
)
FIRST = {"local.lr": 0.01, "method.mu": 0.1, "rounds": 400}


def distributions(*words):
    return {
        own.key_or_group: parse_distribution(own)
        for own in OverridesParser.create().parse_overrides(list(words))
    }


def search(folder, batch=1, seed=3, first=FIRST, count=8, words=WORDS):
    settings = SearchSettings(trials=count, batch=batch, startup=3, warmup=2, seed=seed)
    return Search(folder / "study.json", distributions(*words), first, settings)


def judged(jobs):
    """Better the nearer to lr 0.03 and mu 1; small rates diverge."""
    found = []
    for _, words in jobs:
        lr, mu, rounds = (float(word.partition("=")[2]) for word in words)
        value = None if lr < 0.003 else 90 - 10 * abs(np.log(lr / 0.03)) + mu
        found.append(trials.TrialResult(value, int(rounds)))
    return found


def test_distributions_are_hydras_sweeps():
    kinds = optuna.distributions
    space = distributions(
        *WORDS, "clients=interval(2,5)", "method=fedavg,fedobp", "a=[1,2],[3]", "b=range(0,5)"
    )
    assert space["local.lr"] == kinds.FloatDistribution(0.001, 0.1, log=True)
    assert space["method.mu"] == kinds.CategoricalDistribution(("0.01", "0.1", "1"))
    assert space["rounds"] == kinds.IntDistribution(1, 9, step=2)
    assert space["clients"] == kinds.FloatDistribution(2, 5)
    assert space["method"] == kinds.CategoricalDistribution(("fedavg", "fedobp"))
    assert space["a"] == kinds.CategoricalDistribution(("[1,2]", "[3]"))
    assert space["b"] == kinds.IntDistribution(0, 4)
    with pytest.raises(FedpflError, match=r"range\(0,1,0.1\): ranges are of whole numbers"):
        distributions("local.lr=range(0,1,0.1)")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Make a search of a batch that nobody kills, and what it found, once."""

    @functools.cache
    def find(batch):
        own = search(tmp_path_factory.mktemp("whole"), batch)
        return own, own.run(judged, str)

    return find


@pytest.mark.parametrize("batch", [3, 1])
def test_what_is_found_is_the_best_that_ended(batch, whole):
    own, found = whole(batch)
    params = [trial["params"] for trial in own.trials]
    first = {"local.lr": 0.01, "method.mu": "0.1", "rounds": 0}
    assert params[0] | {"rounds": 0} == first, "the configuration's, where the space has them"
    assert sum(found.trials.values()) == len(own.trials) == 8
    assert found.trials["given up"] > 0
    assert found.rounds == sum(one["rounds"] for one in params)
    best = max(own.trials, key=lambda trial: trial["value"] or 0)
    assert found.value == best["value"]
    values = best["params"]
    wanted = f"local.lr={values['local.lr']:.4g}", f"method.mu={values['method.mu']}"
    assert found.overrides == (*wanted, f"rounds={values['rounds']}")


def dying(real, kill):
    """Return a function of which a call is a kill."""
    calls = itertools.count(1)

    def call(*given):
        if next(calls) == kill:
            raise KeyboardInterrupt
        return real(*given)

    return call


@pytest.mark.parametrize("batch", [1, 3])
def test_killed_anywhere_it_ends_in_the_same_trials(batch, whole, tmp_path):
    """While a batch is played, and before it is written."""
    alone, found = whole(batch)
    for kill, where in itertools.product((1, 2, 3), ("play", "write")):
        folder = tmp_path / f"{kill} {where}"
        own = search(folder, batch)
        play = judged if where == "write" else dying(judged, kill)
        own._write = own._write if where == "play" else dying(own._write, kill)
        with pytest.raises(KeyboardInterrupt):
            own.run(play, lambda line: None)
        again = search(folder, batch)
        assert again.run(judged, lambda line: None) == found
        assert again.path.read_text() == alone.path.read_text()


def test_other_seeds_propose_other_values(whole, tmp_path):
    own = search(tmp_path, batch=3, seed=4, count=2)
    own.run(judged, lambda line: None)
    assert whole(3)[0].trials[1]["params"] != own.trials[1]["params"]


def test_where_none_comes_to_its_end_it_says_so(tmp_path):
    with pytest.raises(FedpflError, match="none of 2 trials finished"):
        search(tmp_path, count=2).run(lambda jobs: [trials.TrialResult(None, 3)], str)


def test_a_trial_is_judged_by_validation_accuracy_alone(tmp_path):
    """What stands in another column is not even read."""
    text = "round,accuracy,val_accuracy,unseen_accuracy\n1,poison,50.5,poison\n2,poison,,poison\n3,poison,49,\n"
    (tmp_path / "rounds.csv").write_text(text)
    assert trials.read_trial_result(tmp_path) == trials.TrialResult(50.5, 3, "", [(1, 50.5)])
    lost = trials.read_trial_result(tmp_path, lost="given up")
    assert lost == trials.TrialResult(None, 3, "given up", [(1, 50.5), (3, 50.5)])
    for text in ("round,accuracy\n1,90\n", "round,accuracy,val_accuracy\n1,90,nan\n"):
        (tmp_path / "rounds.csv").write_text(text)
        with pytest.raises(FedpflError, match=r"set validation=0\.1"):
            trials.read_trial_result(tmp_path)


METRICS = {"val_accuracy": (40, 60, 50), "val_ft_accuracy": (40, 60, 50), "val_loss": (3, 1, 2)}
"""A column, with a bad, a good and a middling value."""


@pytest.mark.parametrize("metric", METRICS)
def test_a_trial_worse_than_the_median_of_those_that_ended_is_given_up(metric, tmp_path):
    """By its best round so far, from the rounds of `warmup` on, and in that column alone."""
    bad, good, middling = METRICS[metric]
    ended = [
        {"value": 1.0, "curve": [[1, good], [4, value], [5, good]]} for value in METRICS[metric]
    ]
    ended += [{"value": None, "curve": [[4, good]]}, {"value": 1.0, "curve": []}]
    options = {"study": "study", "folder": str(tmp_path), "prune": True}

    def is_given_up(*scores, startup=4, is_finished=None, **more):
        stored = {"metric": metric, "warmup": 2, "startup": startup, "trials": ended}
        (tmp_path / "study.json").write_text(json.dumps(stored))
        trial = trials.SearchTrial({**options, **more})
        try:
            if is_finished is not None:
                lines = [f"{step},1,{score}\n" for step, score in scores]
                (tmp_path / "rounds.csv").write_text(f"round,accuracy,{metric}\n{''.join(lines)}")
                trial.replay(tmp_path, is_finished)
            else:
                for step, score in scores:
                    trial.judge(step, {"accuracy": 0.0, metric: score})
        except TrialPruned:
            return True
        return False

    assert is_given_up((4, bad))
    assert not is_given_up((4, middling)), "equal to the median"
    assert not is_given_up((4, middling), (5, None), (6, bad)), "nothing is known of round 6"
    assert not is_given_up((3, good), (4, bad)), "its best round counts"
    assert not is_given_up((1, bad), (4, None), (4, float("nan")))
    assert not is_given_up((4, bad), startup=5)
    assert not is_given_up((4, bad), prune=False)
    # A run that is there is judged as it was played: not at its end.
    assert not is_given_up((4, bad), is_finished=True)
    assert is_given_up((4, bad), is_finished=False)
    assert is_given_up((4, bad), (5, bad), is_finished=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a data set of three classes that a few rounds tell apart in part."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    y = rng.integers(0, 3, 240)
    x = rng.normal(size=(240, 1, 6)).astype(np.float32) + y[:, None, None]
    np.savez(folder / "mine.npz", x=x, y=y)
    return folder


def tuned(folder, *words, out=None):
    path = format_override("dataset.path", folder / "mine.npz")
    more = "dataset=npz partition=iid model=mlp model.hidden=[8] clients=6 rounds=3"
    more += " participation=1 local.epochs=2 local.batch_size=4 eval.every=1"
    return run(out or folder / "tuned", *keep_last_words(path, *more.split(), *words))


def run(folder, *words):
    result = call_main(tune.main, *words, format_override("hydra.sweep.dir", folder))
    return result.code, result.err + result.out


FEDPROX = "method=fedprox", "trials=2", "seeds=1", "validation=0.2", "unseen=0.2"


def test_what_is_found_is_run_with_fresh_seeds_and_judged_at_its_best_validation_round(data):
    code, text = tuned(data, *FEDPROX)
    assert code == 0, text
    told = text.partition("Tuned on equal terms\n")[0].splitlines()
    told = [line for line in told if "newcomers are judged after fine-tuning alone" not in line]
    folder = data / "tuned"
    assert told[0] == "fedpfl: method=fedprox: 2 trials of local.lr, method.mu"
    assert [line[:17] for line in told[1:3]] == [f"fedpfl: trial {k}/2" for k in (1, 2)]
    assert told[3].startswith("fedpfl: best of ")
    assert told[4].startswith("fedpfl: method=fedprox: 1 fresh seed of local.lr=")
    assert [line[:15] for line in told[5:]] == ["sweep: run 1 of", "sweep: 1/1 done"]
    row = pd.read_csv(folder / "tuned.csv").set_index("method").loc["fedprox"]
    (path,) = (folder / "final").rglob("fedprox/*/*/rounds.csv")
    assert path.parent.name == "seed43", "no seed that a trial has had"
    best = best_round(pd.read_csv(path), "val_accuracy")
    assert row["accuracy"] == pytest.approx(best["accuracy"])
    assert row["rounds"] <= 9


@pytest.mark.full
def test_the_metric_decides_which_trial_wins(data, tmp_path):
    """Of two rates one is better before fine-tuning and one after."""
    words = "method=fedavg rounds=5 trials=2 seeds=1 seed=44 validation=0.2 eval.finetune_epochs=2"
    words += " partition=dirichlet partition.alpha=0.3 partition.min_samples=4"
    words += " local.lr=choice(0.3,1.0)"
    chosen = {}
    before = set()
    for metric in ("val_accuracy", "val_ft_accuracy"):
        code, text = tuned(data, *words.split(), f"metric={metric}", out=tmp_path)
        assert code == 0, text
        (row,) = pd.read_csv(tmp_path / "tuned.csv").to_dict("records")
        chosen[metric] = row["chosen"]
        told = " ".join(text.split())
        assert f"chosen by {metric} (mean validation accuracy over clients" in told
        assert f"median {metric} is given up" in told
        paths = {*tmp_path.rglob("rounds.csv")} - before
        before |= paths
        trial_rows = [pd.read_csv(path) for path in paths if "trials" in path.parts]
        assert len(trial_rows) == 2, "each search has trials of its own"
        assert all(rows[metric].notna().all() for rows in trial_rows), "each evaluation judges"
        assert row[metric] == pytest.approx(max(rows[metric].max() for rows in trial_rows))
        (final,) = [pd.read_csv(path) for path in paths if "final" in path.parts]
        assert row["accuracy"] == pytest.approx(best_round(final, metric)["accuracy"])
    assert chosen == {"val_accuracy": "local.lr=1.0", "val_ft_accuracy": "local.lr=0.3"}
    rounds = {best_round(final, name)["round"] for name in chosen}
    assert len(rounds) == 2, "the last of the final runs tells both columns apart"


@pytest.mark.full
def test_what_diverges_at_once_is_a_trial_and_leaves_test_cells_empty(data):
    words = "method=fedavg", "trials=4", "seeds=2", "local.lr=choice(0.05,1e30)", "validation=0.2"
    code, text = tuned(data, *words)
    assert code == 0, text
    (row,) = pd.read_csv(data / "tuned" / "tuned.csv").to_dict("records")
    assert (row["chosen"], row["finished"] + row["given up"]) == ("local.lr=0.05", 4)
    assert row["given up"] > 0
    assert row["seeds"] == 2
    assert row["accuracy"] > 0
    assert "fedpfl: trial 2/4" in text
    assert text.count("  local.lr=1e+30: diverged\n") == 4 - row["finished"]
    assert "fedavg: local.lr=0.05: at the end of what was searched; better values may" in text
    # Of some diverged there is no mean either.
    finals = sorted((data / "tuned" / "final").rglob("fedavg/*/seed*"))
    rewrite_summary(finals[0], status="diverged")
    assert tuning._read_test_scores(finals, ["accuracy"]) == {"accuracy": None, "seeds": 1}
    bad = SearchResult(("local.lr=1e30",), 50.0, {"finished": 4, "given up": 0}, 12)
    with mock.patch.object(Search, "_find_best", return_value=bad):
        code, text = tuned(data, *words)
    assert code == 0, text
    (row,) = pd.read_csv(data / "tuned" / "tuned.csv").to_dict("records")
    assert (row["seeds"], row["accuracy"]) == (0, pytest.approx(np.nan, nan_ok=True))
    assert "fedavg: 2 of the final runs did not finish, so its test cells stay empty." in text


REFUSALS = """
method=fedavg metric=val_ft_accuracy | metric=val_ft_accuracy needs fine-tuning; set eval.finetune_epochs=5
method=fedavg trials=0 | trials must be a whole number from 1 on, got '0'
method=fedavg seed=1,2 | seed is no hyperparameter; search with one seed
method=fedavg validation=0 | a search needs held-out samples
method=fedavg,fedrep local.epochs=1 | method=fedrep is itself only with method.body_epochs above 0, below epochs (here epochs=1)
"""


@pytest.mark.parametrize(("words", "message"), keep_quick(read_cases(REFUSALS, " | "), 5))
def test_bad_input_is_one_line(words, message, tmp_path):
    code, text = run(tmp_path / "tuned", *words.split())
    assert code == 2
    assert message in text
    assert len(text.splitlines()) == 1


SPACES = sorted(yaml.safe_load(spaces.SPACES_FILE.read_text()))


@pytest.mark.parametrize("name", keep_quick([name for name in SPACES if name != "all"]))
def test_every_space_is_of_its_method(name):
    assert name in METHODS
    space = distributions(*spaces.make_search_space(name, ()))
    assert "local.lr" in space
    for end in (0, -1):
        words = [f"method={name}"]
        for key, own in space.items():
            words.append(f"{key}={(getattr(own, 'choices', None) or (own.low, own.high))[end]}")
        check_config(compose_once(*words))
    assert {*spaces._read_space(name).get("limits", {})} <= {*space}
    given = ("local.lr=", "quantile.q=")
    left = [word for word in spaces.make_search_space(name, ()) if not word.startswith(given)]
    searched = spaces.make_search_space(name, ("local.lr=0.1", "quantile.q=0.5"))
    assert searched == (left or ["local.lr=choice(0.1)"])


LIMITED = """
fedper | model=mlp method.layers=choice(0,1,2,3,4) | choice(1,2) | 0, 3, 4 | above 0, below layers (here layers=3)
fedala | model=mlp method.layers=choice(0,1,2,3,4) | choice(1,2,3) | 0, 4 | above 0, at most layers (here layers=3)
fedrep | local.epochs=3,9 method.body_epochs=choice(2,4) | choice(2) | 4 | above 0, below epochs (here epochs=3)
fedper | model=mlp method.layers=7 | 7
"""
"""Method | words | what is left of the last | what is lost, by which rule."""


def test_what_makes_the_method_another_one_is_not_searched(capsys):
    """A value that is asked for, and no proposal, stays."""
    for method, words, left, *lost in read_cases(LIMITED, " | "):
        searched = [f"method={method}", "clients=4", *words.split()]
        key = searched[-1].partition("=")[0]
        cfg = tuning.check_words(method, searched[:-1])
        kept = spaces.keep_within_limits(method, searched, cfg)
        assert kept == [*searched[:-1], f"{key}={left}"]
        told = capsys.readouterr().err
        if lost:
            rule = f"method={method} is itself only with {key} {lost[1]}"
            assert told == f"fedpfl: {key}={lost[0]} is not searched: {rule}\n"
        assert bool(told) == bool(lost)
    never = ["method=fedper", "model=mlp", "clients=4", "method.layers=3,4"]
    message = r"=3,4: method=fedper is itself only with method\.layers above 0, below layers"
    with pytest.raises(FedpflError, match=message):
        spaces.keep_within_limits("fedper", never, tuning.check_words("fedper", never[:-1]))


def test_a_chosen_group_is_not_searched_but_where_it_is_open():
    for word in ("quantile=paper", "quantile=auto", "quantile=tuned"):
        space = " ".join(spaces.make_search_space("fedobp", (word,)))
        assert ("quantile.q=" in space) == (word == "quantile=tuned")
    assert "method.lam=" in " ".join(spaces.make_search_space("ditto", ("quantile=paper",)))
