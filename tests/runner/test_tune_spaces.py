"""What `tune` searches of methods of a user's own, and words that are for some of several methods."""

import contextlib
from unittest import mock

import pytest

from fedpfl import tune
from fedpfl.config import plugins
from fedpfl.config.run_location import register_resolver
from fedpfl.runner import tuning
from fedpfl.runner.search import SearchResult, search_results
from tests.command import TINY_TASK, format_override
from tests.conftest import ROOT

pytest.importorskip("optuna")
pytestmark = pytest.mark.filterwarnings(r"ignore:\s*.*is validated against:UserWarning")
MINE = format_override("plugins", [ROOT / "docs/mine.py"])
SMALL = (*TINY_TASK, "rounds=1", "model=mlp", "model.hidden=[8]", "trials=1", "seeds=1")


def searched(*words: str) -> dict[str, tuple[list[str], list[str]]]:
    """By method the words of its search, and those of its final runs."""
    found = {}

    def tuned(asked, method, own, of_search, play):
        found[method] = of_search, own
        record = {"method": method, "seeds": asked.seeds, "at_end": ""}
        return tuning.TunedMethod(record, [])

    with (
        mock.patch.object(tuning, "_tune_method", tuned),
        contextlib.suppress(KeyError, IndexError),
    ):  # there is nothing for a table
        tuning.tune_methods(tune.parse_request([*SMALL, *words]), lambda *given: None)
    return found


def test_the_space_of_a_plugin_is_searched():
    ((words, _),) = searched("method=halfway", MINE).values()
    assert any(word.startswith("method.share=") for word in words)
    plugins.load_plugins([])


@pytest.mark.full
@pytest.mark.parametrize("value", ["tag(log,interval(0.01,1))", "0.1,1"])
def test_a_key_of_some_of_several_methods_is_for_those(value, capsys):
    found = searched("method=fedavg,fedprox,moon", f"method.mu={value}")
    told = [line for line in capsys.readouterr().err.splitlines() if "method.mu" in line]
    assert told == [
        f"fedpfl: method=fedavg has no method.mu, so method.mu={value} is for the other methods"
        " alone"
    ]
    for method, both in found.items():
        for words in both:
            own = [word for word in words if "method.mu" in word]
            assert own == [f"method.mu={value}"] * (method != "fedavg")
    assert any(word.startswith("local.lr=") for word in found["fedavg"][0])


def test_final_runs_of_other_code_are_run_again(tmp_path):
    register_resolver()
    asked = []

    def play(options, words, **more):
        asked.append(words)
        if "hydra/sweeper=optuna" in options:
            search_results.append(SearchResult(("local.lr=0.05",), 50.0, {}, 1))

    place = format_override("hydra.sweep.dir", tmp_path)
    request = tune.parse_request([*SMALL, "method=fedavg", place])
    for is_outdated in (False, True):
        ((_, (path,)),) = tuning.search_methods(request, play)
        assert ("restart=true" in asked[-1]) == is_outdated
        path.mkdir(parents=True, exist_ok=True)
        (path / "summary.json").write_text('{"identity": "a", "code": [{"method": "other"}]}')
