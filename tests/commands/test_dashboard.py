"""The dashboard's view, and what stops it is one line; tests/record/test_wandb.py has its columns."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest

from fedpfl import dashboard
from tests.record.test_wandb import _nobody_is_logged_in, wandb  # noqa: F401 - a fixture

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("wandb_workspaces") is None,
    reason="the package wandb-workspaces is not installed",
)


def test_without_the_package_a_dry_run_prints_and_saving_is_one_line(monkeypatch, capsys):
    for name in ("wandb_workspaces", "wandb_workspaces.workspaces", "wandb_workspaces.reports.v2"):
        monkeypatch.setitem(sys.modules, name, None)
    assert dashboard.main(["--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [*dashboard.SECTIONS]
    assert "  scatter  last_accuracy one_minus_q" in lines
    assert dashboard.main([]) == 2
    assert capsys.readouterr().err == f"fedpfl: {dashboard.MISSING}\n"


@needs_package
def test_the_specification_holds_every_section():
    options = Namespace(entity="me", project="fedpfl", experiment="q_sweep")
    view = dashboard.make_workspace(options)._spec
    section = view["spec"]["section"] if "spec" in view else view["section"]
    bank = section["panelBankConfig"]["sections"]
    assert [part["name"] for part in bank] == [*dashboard.SECTIONS]
    counts = [len(panels) for panels in dashboard.SECTIONS.values()]
    assert [len(part["panels"]) for part in bank] == counts
    (runs,) = section["runSets"]
    (only,) = runs["filters"]["filters"]
    assert (only["key"]["name"], only["value"]) == ("group", "q_sweep")
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
