"""The command `fedpfl`, its completion, and the wheel in a clean environment."""

import logging
import os
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import fedpfl
from fedpfl import __main__ as command
from tests.command import TINY, call_main
from tests.conftest import ROOT, keep_quick, read_cases


@pytest.fixture
def ask(monkeypatch):
    """What the command prints to a shell that has this line."""

    def answer(line: str, shell: str = "bash") -> list[str]:
        monkeypatch.setenv("COMP_LINE", line)
        said = call_main(command.main, "-sc", f"query={shell}")
        assert not said.err
        return said.out.split()

    return answer


COMPLETED = """
fedpfl tr => train
fedpfl train method=fedobp_ => method=fedobp_adaptive
/bin/fedpfl train -m rounds=3 local.ep => local.epochs= local.eps=
fedpfl train method=ditto method.personal => method.personal_epochs=
"""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_answers_commands_keys_and_choices(shell, ask):
    """And is silent where it knows nothing."""
    assert {*ask("fedpfl ", shell)} == {*command.COMMANDS}
    for line, some in read_cases(COMPLETED):
        assert {*ask(line, shell)} == {*some.split()}, line
    for line in ("train method=nothing x", "train --bogus l", "report l", "xy"):
        assert ask(f"fedpfl {line}", shell) == []


AGAIN = ("fedpfl.train", "fedpfl.check")


ANSWERS = f"""
 => 0 => fedpfl train
--version => 0 => {fedpfl.__version__}
trian => 2 => fedpfl: trian is no command; there are train, check, card, oracle, report, export, federate,
report ls nowhere => 2 => no such directory: nowhere
train local.lrr=1 => 2 => fedpfl: local.lrr is not a key here; did you mean local.lr?
train --cfg job method=ditto rounds=77 => 0 => rounds: 77
"""


@pytest.mark.parametrize(("line", "code", "text"), read_cases(ANSWERS.replace("\n =>", "\n'' =>")))
def test_the_command(line, code, text, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    for name in [name for name in sys.modules if name in AGAIN or name.startswith("fedpfl.report")]:
        monkeypatch.delitem(sys.modules, name)  # as in a process of its own
    try:
        said = call_main(command.main, *shlex.split(line.replace("''", "")))
    finally:
        logging.captureWarnings(False)
    assert said.code == int(code)
    assert text in (said.err if said.code else said.out)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", keep_quick(["fedpfl", "fedpfl.train", "fedpfl.report"]))
def test_a_python_without_the_packages_is_told_in_one_line(module):
    told = subprocess.run(
        [sys.executable, "-S", "-m", module], cwd=ROOT, capture_output=True, text=True
    )
    assert (told.returncode, told.stdout, told.stderr.count("\n")) == (1, "", 1), told.stderr
    assert "give `make setup`, then use .venv/bin/python" in told.stderr


def run(*words: object, cwd: Path) -> str:
    """What a program prints that sees neither this tree nor variables that would lead there."""
    leading = ("PYTHON", "FEDPFL", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(leading)}
    pipes = {"env": kept, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([*map(str, words)], cwd=cwd, **pipes)
    assert done.returncode == 0, done.stderr
    return done.stdout


PACKAGES = [place for place in sys.path if place.endswith("-packages")]


def clone(folder: Path) -> Path:
    """A copy of what makes the package, as a clone has it."""
    for name in ("conf", "docs/results", "fedpfl", "hydra_plugins"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def environment(folder: Path, built: Path) -> Path:
    """The programs of an environment that has what was built, beside its needs."""
    programs = folder / "env" / "bin"
    venv.create(programs.parent)
    (wheel,) = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", programs / "python")
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = run(programs / "python", "-c", code, cwd=folder).strip()
    # A folder named in a .pth is looked into; its own .pth files, which lead to this tree, are not.
    Path(own, "others.pth").write_text("".join(f"{place}\n" for place in PACKAGES))
    return programs


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The programs of an environment that has the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = clone(folder / "source")
    alone = ("--no-deps", "--no-build-isolation", "--no-index")
    run(sys.executable, "-m", "pip", "wheel", source, *alone, "--wheel-dir", folder, cwd=folder)
    shutil.rmtree(source)
    return environment(folder, folder)


@pytest.mark.full
def test_the_wheel_works_from_any_folder(installed, tmp_path):
    code = "import sys, fedpfl, hydra_plugins; print(fedpfl.__file__, *sys.path, sep='\\n')"
    where, *seen = run(installed / "python", "-c", code, cwd=tmp_path).splitlines()
    assert str(ROOT) not in where
    assert Path(where).is_relative_to(installed.parent)
    assert Path(where).with_name("py.typed").is_file()
    assert str(ROOT) not in {*seen} - {*PACKAGES}

    program = installed / "fedpfl"
    run(program, "train", *TINY, "method=fedobp", cwd=tmp_path)
    (path,) = tmp_path.glob("outputs/digits/fedobp/*/seed42")
    assert (path / "state.pt").is_file()
    told = run(installed / "python", "-m", "fedpfl.train", *TINY, "method=fedobp", cwd=tmp_path)
    assert told.startswith("already finished: ")
    sweep = ("-m", "hydra/launcher=lockstep", "method=fedavg,fedper")
    run(program, "train", *TINY, *sweep, cwd=tmp_path)
    sweep = ("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2")
    run(program, "train", *TINY, *sweep, cwd=tmp_path)
    assert len([*tmp_path.glob("outputs/digits/*/*/seed*/state.pt")]) == 5
    assert "FedOBP" in run(program, "report", "tables", cwd=tmp_path)
    assert "TsingZ0/PFLlib" in run(program, "card", "fedper", cwd=tmp_path)
    assert "Dir(0.1)" in run(program, "report", "paper", "fedobp/table3", cwd=tmp_path)
    run(program, "report", "html", cwd=tmp_path)
    assert [*tmp_path.glob("outputs/report/*.html")]
    run(program, "export", path, "models", cwd=tmp_path)
    assert "  all is kept" in run(program, "check", ROOT / "docs/mine.py", "--quick", cwd=tmp_path)
    assert len([*tmp_path.glob("models/client*.pt")]) == 4
    code = f"import fedpfl; print(fedpfl.run(*{TINY}, progress=False).status)"
    assert run(installed / "python", "-c", code, cwd=tmp_path).splitlines()[-1] == "finished"
