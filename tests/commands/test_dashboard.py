"""The dashboard's view, and what stops it is one line; tests/record/test_wandb.py has what it names."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from fedpfl import dashboard
from tests.conftest import keep_quick
from tests.record.test_wandb import _nobody_is_logged_in, wandb  # noqa: F401 - a fixture

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("wandb_workspaces") is None,
    reason="the package wandb-workspaces is not installed",
)
SECTIONS = [
    *("Accuracy", "Cohort", "Traffic", "q sweep", "alpha sweep", "Personalised entries", "Cost"),
    "Table",
]


@pytest.fixture
def no_package(monkeypatch):
    for name in ("wandb_workspaces", "wandb_workspaces.workspaces", "wandb_workspaces.reports.v2"):
        monkeypatch.setitem(sys.modules, name, None)


def test_a_dry_run_needs_neither_package_nor_login(no_package, capsys):
    assert dashboard.main(["--dry-run", "--project", "p", "--experiment", "q_sweep"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line in SECTIONS] == SECTIONS
    assert "view      fedpfl q_sweep\n" in out
    assert "(your account)/p\n" in out
    assert "runs      group q_sweep," in out
    titles = [panel.title for section in dashboard.SECTIONS.values() for panel in section]
    assert all(title in out for title in titles)
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("words", [[], ["--dry-run", "--json"]])
def test_a_missing_package_is_one_line(no_package, words, capsys):
    assert dashboard.main(words) == 2
    assert capsys.readouterr().err == f"fedpfl: {dashboard.MISSING}\n"


@needs_package
@pytest.mark.parametrize(
    ("by", "group"),
    keep_quick([("method", "jobType"), ("run", None), ("configuration", "identity.value")]),
)
def test_the_specification_holds_every_section(capsys, by, group):
    words = "--dry-run --json --entity me --name mine --experiment q_sweep --by"
    assert dashboard.main([*words.split(), by]) == 0
    view = json.loads(capsys.readouterr().out)
    assert (view["entity"], view["project"], view["displayName"]) == ("me", "fedpfl", "mine")
    section = view["spec"]["section"]
    bank = section["panelBankConfig"]["sections"]
    assert [part["name"] for part in bank] == SECTIONS
    counts = [len(panels) for panels in dashboard.SECTIONS.values()]
    assert [len(part["panels"]) for part in bank] == counts
    panels = [panel for part in bank for panel in part["panels"]]
    lines = [panel for panel in panels if panel["viewType"] == "Run History Line Plot"]
    assert {panel["config"].get("groupBy") for panel in lines} == {group}
    (runs,) = section["runSets"]
    (only,) = runs["filters"]["filters"]
    assert (only["key"], only["op"]) == ({"section": "run", "name": "group"}, "=")
    assert only["value"] == "q_sweep"
    assert runs["runFeed"]["columnOrder"] == ["run:displayName", *dashboard.PINNED_COLUMNS]


@needs_package
def test_a_view_is_saved_or_its_failure_is_one_line(monkeypatch, capsys):
    def save(view):
        if view.project == "gone":
            raise ValueError("project\nnot found")
        return SimpleNamespace(url=f"https://example.org/{view.entity}/{view.project}")

    package = importlib.import_module("wandb_workspaces.workspaces")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 3)
    monkeypatch.setattr(wandb, "Api", lambda timeout: SimpleNamespace(default_entity="team"))
    monkeypatch.setattr(package.Workspace, "save", save)
    assert dashboard.main(["--project", "p"]) == 0
    assert capsys.readouterr().out == "saved https://example.org/team/p\n"
    assert dashboard.main(["--project", "gone"]) == 2
    message = "fedpfl: the view was not saved in project gone: ValueError: project not found\n"
    assert capsys.readouterr().err == message
