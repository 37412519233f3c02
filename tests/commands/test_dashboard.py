"""The dashboard's view, and what stops it is one line; tests/record/test_wandb.py has its columns."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from argparse import Namespace

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
