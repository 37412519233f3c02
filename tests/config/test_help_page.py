"""--help: every key, its value, its comment and its choices."""

import re

from omegaconf import OmegaConf

from fedpfl.config import help_page, overrides
from fedpfl.methods import METHODS
from tests.conftest import ROOT

WORDS = ("method=fedobp", "method.score=fisher", "dataset=cifar100", "rounds=7")


def leaves(values, path=""):
    for key, value in values.items():
        if isinstance(value, dict) and value and key != "table":
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


def test_every_key_has_a_line_with_its_value_its_comment_and_its_choices(monkeypatch):
    """Choices are files, or what the schema allows."""
    monkeypatch.setenv("COLUMNS", "200")
    page = help_page.format_help(WORDS)
    flat = " ".join(page.split())
    cfg = overrides.compose_config(WORDS)
    told = dict(re.findall(r"^  ([\w.]+)=(\S*)", page, re.MULTILINE))
    values = OmegaConf.to_container(cfg, resolve=True)
    del values["hydra"]
    chosen = ("name", "title", "groups", "table")
    wanted = {key for key in leaves(values) if key.rpartition(".")[2] not in chosen}
    assert told.keys() == {"name", *wanted}
    assert (told["rounds"], told["method.q"], told["dataset.classes"]) == ("7", "0.9998", "100")
    text = (ROOT / "conf/train.yaml").read_text().split("\nhydra:")[0]
    comments = re.findall(r"^ *\w+:.*? # (.*)$", text, re.MULTILINE)
    assert len(comments) > 25
    for comment in comments[2:]:  # the first two are of the defaults
        assert " ".join(comment.split()) in flat
    assert f"method {', '.join(sorted(METHODS))} quantile" in flat
    for line in (
        r"method.score=fisher +one of obp, obp_as_published, gradient, fisher, fisher_batch$",
        r"^  local.lr=.*(?:\n {30}.*)*a positive number",
        r"^  method.ema=0.0 .*at least 0 and below 1$",
    ):
        assert re.search(line, page, re.MULTILINE), line
