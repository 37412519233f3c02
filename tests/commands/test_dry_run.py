"""`--dry-run` says what a command would run, and writes nothing."""

import re
import urllib.request
from pathlib import Path

import pytest

from fedpfl.runner import timing
from tests.command import TINY, play_run, run_command, snapshot
from tests.conftest import keep_quick, read_cases
from tests.record.test_damage import interrupt

WORDS = ("dataset=digits", "method=fedavg", *TINY, "rounds=8")


def foretold(*words: str, cwd: Path) -> str:
    """What it says of a command that would run."""
    before = snapshot(cwd)
    result = run_command("--dry-run", *words, cwd=cwd)
    assert result.code == 0, result.err
    assert snapshot(cwd) == before
    assert result.out.endswith("dry run     nothing was trained or written\n")
    return result.out


def test_a_run_is_told_as_it_then_tells_itself(tmp_path: Path) -> None:
    words = (*WORDS, "eval.every=3", "eval.finetune_epochs=2", "eval.finetune_every=6")
    words += ("validation=0.1", "unseen=0.25")
    told = foretold(*words, cwd=tmp_path)
    lines = told.splitlines()
    composed = "composition dataset=digits partition=dirichlet model=mlp adapter=none method=fedavg"
    assert lines[0].startswith(f"{composed} ")
    assert lines[2].startswith("local       epochs=1 batch_size=32 ")
    kinds = "8 rounds of N s, 1 evaluation of N s, 2 evaluations with fine-tuning of N s"
    kinds = kinds.replace("N", r"[\d.e+-]+")
    assert re.search(rf"\ntime        about \d+:\d\d:\d\d: {kinds}\n", told)
    counts = r"(\d+) training, (\d+) test, (\d+) validation samples"
    split = re.search(rf"split       {counts}; data_dir=data\n", told)
    assert split
    assert sum(map(int, split.groups())) == 4 * 24
    assert "status      new" in lines

    result = run_command(*words, cwd=tmp_path)
    header = [line for line in result.err.splitlines() if re.match(r"\w+( set)?  +\S", line)]
    assert len(header) > 7
    for line in header[: header.index(next(one for one in header if one.startswith("directory")))]:
        assert line.startswith("time  ") or line in lines
    assert f"directory   {next(tmp_path.glob('outputs/*/*/*/*')).relative_to(tmp_path)}" in told
    assert "status      finished, nothing is left to do" in foretold(*words, cwd=tmp_path)
    assert "status      new" in foretold(*words, "restart=true", cwd=tmp_path)


def test_what_an_interrupted_run_has_left(tmp_path: Path) -> None:
    words = (*WORDS, "eval.every=8")
    interrupt(tmp_path / "run", *words, after=2)
    told = foretold(*words, "hydra.run.dir=run", cwd=tmp_path)
    # The last row is of round 2, but the run goes on from the checkpoint before it.
    assert "status      interrupted after round 1, from where it goes on" in told
    assert ": 7 rounds of" in told
    assert "\ntime        about 0:00:0" in (told := play_run(tmp_path / "run", *words))
    assert ": 7 rounds of" in told


def test_a_sweep_has_a_line_a_run_and_a_total(tmp_path, monkeypatch):
    timed = []

    def forecast(run: timing.Run, state: object) -> timing.Forecast:
        timed.append(run.config["method"]["name"])
        return timing.Forecast(2.0 if timed[-1] == "fedavg" else 4.0, 1.0, 0.0)

    monkeypatch.setattr(timing, "forecast_run", forecast)
    told = foretold("-m", *WORDS, "eval.every=8", "method=fedavg,ditto", "seed=1,2", cwd=tmp_path)
    ends = {"fedavg": "about 0:00:17: 8 rounds of 2 s", "ditto": "about 0:00:33: 8 rounds of 4 s"}
    runs = [(method, seed) for method in ends for seed in (1, 2)]
    for number, (method, seed) in enumerate(runs, 1):
        line = (
            f"run {number} of 4  method={method} seed={seed}: {ends[method]}, 1 evaluation of 1 s"
        )
        assert f"\n{line}\n" in told
    assert "\nsweep       4 runs: about 0:01:40 one after another\n" in told
    assert timed == ["fedavg", "ditto"]  # seeds take as long


@pytest.mark.full
def test_experiments_bring_their_sweep_and_searches_their_trials(tmp_path: Path) -> None:
    told = foretold("experiment=demo", "rounds=2", "model=mlp", "clients=4", cwd=tmp_path)
    methods = ["fedobp", "fedavg", "fedper", "local_only"]
    assert re.findall(r"\nrun \d of 4  method=(\w+): about", told) == methods
    assert "experiment=demo" in told
    words = ("hydra/sweeper=optuna", "hydra.sweeper.trials=7", "local.lr=interval(0.01,0.1)")
    told = foretold("-m", *WORDS, *words, "validation=0.1", cwd=tmp_path)
    assert "\nsearch      7 trials, at most " in told
    globbed = foretold("-m", *WORDS, "rounds=1", "method=glob(fedp*)", cwd=tmp_path)
    assert globbed.count("\nrun ") >= 3


REFUSED = """
seed=1,2 => seed=1,2 is a sweep
--cfg job => --dry-run goes with -m alone; leave out --cfg
dataset=har => data set har is not in data_dir=data .*put folder 'UCI HAR Dataset'
-m method=fedavg,ditto rounds=1,0 => 2 of 4 runs would be refused: run 2 of 4  method=fedavg rounds=0
"""


@pytest.mark.parametrize(("words", "line"), keep_quick(read_cases(REFUSED), 3))
def test_what_the_command_would_refuse_is_refused(words: str, line: str, tmp_path: Path) -> None:
    result = run_command("--dry-run", *WORDS, *words.split(), cwd=tmp_path)
    assert result.code == 2
    (told,) = result.complaints
    assert re.search(line, told)
    assert "dry run" not in result.out
    assert snapshot(tmp_path) == {}


def test_data_that_would_be_downloaded_are_not(tmp_path, monkeypatch):
    def asked(*about: object, **more: object) -> None:
        raise AssertionError("a dry run asks nobody")

    monkeypatch.setattr(urllib.request, "urlopen", asked)
    told = foretold(*WORDS, "dataset=cifar10", "data_dir=here", cwd=tmp_path)
    absent = "data set cifar10 is not in data_dir=here; a run would download https://"
    assert f"\ndata        {absent}" in told
