"""A method's card: of the house with its oracles and the board, of a plugin with its own runs."""

from pathlib import Path
from typing import Any

import pytest

from fedpfl import card
from fedpfl.ground import answer
from fedpfl.methods import METHODS
from fedpfl.testing.method_promises import METHOD_PROMISES
from fedpfl.testing.promises import Verdict
from tests.command import TINY, call_main, play_run
from tests.commands.test_answers import SCHEMA, find_faults
from tests.conftest import ROOT

RUN = (*TINY, "participation=1", "eval.finetune_epochs=1", "seed=3")


@pytest.fixture
def ask_card(monkeypatch):
    """A method's facts, which keep to the schema, and its Markdown."""

    def run(*words: str) -> tuple[dict[str, Any], str]:
        monkeypatch.setattr(answer, "_facts", {})
        result = call_main(card.main, *words)
        assert result.code == 0, result.err
        facts = answer.make_plain(answer._facts)
        assert find_faults({"fedpfl": "", "status": 0, **facts}, SCHEMA) == []
        (told,) = facts["cards"]
        return told, result.out

    return run


def test_a_card_has_what_is_known_of_a_method(ask_card, monkeypatch, tmp_path: Path):
    for method in ("method=fedavg", "method=fedper"):
        play_run(tmp_path / method, *RUN, method)
    monkeypatch.setattr(card, "METHOD_PROMISES", METHOD_PROMISES[:2])  # all take seconds
    told, text = ask_card("fedper", str(tmp_path))
    assert told["hooks"] == ["init", "start", "finish"]
    assert told["server_sees"] == METHODS["fedper"].server_sees
    assert {*told["promises"].values()} == {"kept"}
    assert 0.5 < told["down"] == told["up"] < 1 == told["down"] + told["kept"]
    assert told["costs"][0]["extra local work"] == "none"
    assert 0 < max(row["loop"] for row in told["oracles"]) < 1e-6
    assert {row["repository"] for row in told["oracles"]} >= {
        "TsingZ0/PFLlib",
        "KarhouTam/FL-bench",
    }
    assert all(row["command"].startswith("python -m fedpfl.train") for row in told["board"])
    (row,) = told["runs"]
    assert "method=fedper" in row["command"]
    assert row["command"].endswith(" seed=3")
    assert 0 <= row["harmed_fedavg"] <= 100
    for words in ("arXiv:1912.00818", "## Beside public code", "## Own runs", "2 of 2 kept"):
        assert words in text


def test_a_plugin_has_a_card(ask_card, monkeypatch, tmp_path: Path):
    broken = Verdict(METHOD_PROMISES[1], ["`self.x` was set"], "")
    monkeypatch.setattr(card, "audit", lambda *_, **__: [broken])
    told, text = ask_card(str(ROOT / "docs/mine.py"))
    assert (told["method"], told["title"]) == ("halfway", "Halfway")
    assert told["hooks"] == ["init", "finish", "personal"]
    assert [told[name] for name in ("costs", "oracles", "board", "runs")] == [[]] * 4
    for words in ("Not compared", "0 of 1 kept", f"not kept: {broken.promise.title}: `self.x`"):
        assert words in text
    for line in (["partition=iid"], ["fedavg", str(tmp_path)]):
        assert call_main(card.main, *line).code == 2
