"""`--dry-run` prints what a command would run, plays its first round, and writes nothing."""

import re
import urllib.request
from pathlib import Path

import pytest

from tests.command import TINY, run_command, snapshot
from tests.conftest import keep_quick, read_cases
from tests.record.test_damage import interrupt

WORDS = ("dataset=digits", "method=fedavg", *TINY, "rounds=8")


def rehearse(*words: str, cwd: Path) -> str:
    """Return the output of a dry run that succeeds."""
    before = snapshot(cwd)
    result = run_command("--dry-run", *words, cwd=cwd)
    assert result.code == 0, result.err
    assert snapshot(cwd) == before
    assert result.out.endswith("dry run     nothing was trained or written\n")
    return result.out


def test_a_run_is_introduced_as_it_then_introduces_itself(tmp_path: Path) -> None:
    words = (*WORDS, "eval.every=3", "eval.finetune_epochs=2", "eval.finetune_every=6")
    words += ("validation=0.1", "unseen=0.25")
    told = rehearse(*words, cwd=tmp_path)
    lines = told.splitlines()
    composed = "composition dataset=digits partition=dirichlet model=mlp adapter=none method=fedavg"
    assert lines[0].startswith(f"{composed} ")
    assert lines[2].startswith("local       epochs=1 batch_size=32 ")
    measured = r"round 1 took [\d.]+ s, an evaluation of all clients [\d.]+ s"
    assert re.search(rf"\ntime        {measured}\n", told)
    assert "status      new" in lines

    result = run_command(*words, cwd=tmp_path)
    header = [line for line in result.err.splitlines() if re.match(r"\w+( set)?  +\S", line)]
    assert len(header) > 7
    for line in header[: header.index(next(one for one in header if one.startswith("directory")))]:
        assert line in lines
    assert f"directory   {next(tmp_path.glob('outputs/*/*/*/*')).relative_to(tmp_path)}" in told
    assert "status      finished\n" in rehearse(*words, cwd=tmp_path)
    assert "status      new" in rehearse(*words, "restart=true", cwd=tmp_path)


def test_an_interrupted_run_says_how_far_it_is(tmp_path: Path) -> None:
    interrupt(tmp_path / "run", *WORDS, after=2)
    told = rehearse(*WORDS, "hydra.run.dir=run", cwd=tmp_path)
    assert "status      interrupted 2/8\n" in told


def test_a_sweep_has_a_line_a_run(tmp_path):
    told = rehearse("-m", *WORDS, "eval.every=8", "method=fedavg,ditto", "seed=1,2", cwd=tmp_path)
    for number, (method, seed) in enumerate(
        [(method, seed) for method in ("fedavg", "ditto") for seed in (1, 2)], 1
    ):
        assert f"\nrun {number} of 4  method={method} seed={seed}: new\n" in told
    assert told.count("round 1 took") == 1


REFUSED = """
seed=1,2 => seed=1,2 is a sweep
--cfg job => --dry-run goes with -m alone; leave out --cfg
dataset=har => data set har is not in data_dir=data .*put folder 'UCI HAR Dataset'
-m method=fedavg,ditto rounds=1,0 => 2 of 4 runs would be refused: run 2 of 4  method=fedavg rounds=0
local.lr=1e38 => training diverged: client \\d brought back numbers that are not finite
"""


@pytest.mark.parametrize(("words", "line"), keep_quick(read_cases(REFUSED), 3))
def test_what_the_command_would_refuse_is_refused(words: str, line: str, tmp_path: Path) -> None:
    result = run_command("--dry-run", *WORDS, *words.split(), cwd=tmp_path)
    assert result.code in (2, 3)
    (told,) = result.complaints
    assert re.search(line, told)
    assert "dry run" not in result.out
    assert snapshot(tmp_path) == {}


def test_a_sweep_lists_all_runs_and_all_absent_data_and_downloads_none(tmp_path, monkeypatch):
    monkeypatch.setattr(urllib.request, "urlopen", None)
    words = ("-m", *WORDS, "dataset=cifar10,har,svhn,digits", "seed=1,2", "data_dir=here")
    result = run_command("--dry-run", *words, cwd=tmp_path)
    assert result.code == 2
    assert result.out.count("composition ") == 1
    for name in ("cifar10", "har", "svhn"):
        assert result.out.count(f": data set {name} is not in data_dir=here") == 2
    assert "\nrun 8 of 8  dataset=digits seed=2: new\n" in result.out
