"""Plugins: a user's file adds methods, models, data sets and partitions, and nothing else changes."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedpfl
from fedpfl import export
from fedpfl.config import overrides, plugins
from fedpfl.config.run import Run
from fedpfl.engine.measures import PLUGIN_MEASURES
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS
from fedpfl.record.columns import METRICS
from fedpfl.report.load import runs as load_runs
from fedpfl.runner import session
from tests.command import TINY, format_override, read_summary, run_command
from tests.conftest import ROOT, read_cases
from tests.data.promises import build

MINE = (ROOT / "docs/mine.py").read_text()
ALL = ("plugins=[mine.py]", "method=halfway", "model=wide", "dataset=stripes", "partition=equal")
SMALL = (
    *("rounds=2", "clients=4", "participation=0.5", "local.epochs=1", "eval.every=1"),
    "hydra.run.dir=run",
)
METHOD = """
from fedpfl.methods import FedAvg
class Mine(FedAvg):
    {}
METHODS = {{"mine": Mine}}
"""


@pytest.fixture
def folder(tmp_path: Path):
    """A folder with the page's file; what it added is forgotten afterwards."""
    (tmp_path / "mine.py").write_text(MINE)
    yield tmp_path
    plugins.load_plugins([])


def test_the_documented_file_runs_whole_with_values_of_a_folder(folder: Path) -> None:
    (folder / "my_conf/method").mkdir(parents=True)
    (folder / "my_conf/method/halfway.yaml").write_text("name: halfway\nshare: 0.125\n")
    result = run_command("--config-dir", "my_conf", *ALL, *SMALL, "model.width=7", cwd=folder)
    assert result.code == 0, result.err
    assert "method      halfway (share=0.125)" in result.err
    assert "partition   equal (test_fraction=0.25)" in result.err
    assert "wide: 479 parameters" in result.err
    kept = read_summary(folder / "run")["code"][0]
    assert kept.keys() == {"fedpfl", "method", "mine.py"}
    (run,) = load_runs(folder / "run")
    assert (run.method_title, run.method) == ("Halfway", "Halfway")


def test_a_strangers_plugin_is_not_run_unless_it_is_named(folder, capsys, monkeypatch):
    """To look at a run's models is not to run the code that its config.yaml names."""
    monkeypatch.setattr(session, "try_plugins", lambda *about: None)  # it takes seconds
    own = METHOD.format("pass")
    (folder / "mine.py").write_text(own)
    words = ("plugins=[mine.py]", "method=mine", *TINY, "hydra.run.dir=run")
    assert run_command(*words, cwd=folder).code == 0
    plugins.load_plugins([])
    (folder / "mine.py").write_text("raise SystemExit('ran')")
    run = fedpfl.load(folder / "run")
    assert len(run.rounds) == 2
    line = "is of a run with plugins, .* give (.*plugins=.*), or where"
    with pytest.raises(FedpflError, match=line):
        run.personal(0)
    assert export.main([str(folder / "run"), str(folder / "out")]) == 2
    (advice,) = shlex.split(re.search(line, capsys.readouterr().err)[1])
    assert overrides.read_list_value([advice], "plugins") == [str(folder / "mine.py")]
    with pytest.raises(FedpflError, match=r"plugins must be a list .* mean \[mine.py\]"):
        fedpfl.load(folder / "run", plugins="mine.py")
    (folder / "here").mkdir()
    (folder / "here/mine.py").write_text(own)
    assert fedpfl.load(folder / "run", plugins=[folder / "here/mine.py"]).personal(0)
    plugin = format_override("plugins", [folder / "here/mine.py"])
    assert export.main([str(folder / "run"), str(folder / "out"), plugin]) == 0


CARELESS = """
import numpy as np, torch
from fedpfl.data.datasets import Raw
from fedpfl.data.partition import Partition
def noise(source) -> Raw:
    return Raw(np.random.randint(0, 256, (60, 1, 4, 4)).astype(np.uint8), np.arange(60) % 3)
def dice(y, clients, seed):
    y[:] = 0
    parts = np.array_split(torch.randperm(len(y)).numpy(), clients)
    return Partition(tuple(part[5:] for part in parts), tuple(part[:5] for part in parts))
DATASETS, PARTITIONS = {"noise": noise}, {"dice": dice}
"""


def test_what_a_plugins_data_draw_from_the_process_is_a_function_of_the_seed(folder: Path) -> None:
    """And labels that a partition spoils are its own copy."""
    (folder / "mine.py").write_text(CARELESS)
    plugins.load_plugins([folder / "mine.py"])
    words = (
        format_override("plugins", [folder / "mine.py"]),
        *("dataset=noise", "partition=dice", "model=mlp", "clients=4"),
    )

    def made(state: int, *more: str) -> Run:
        np.random.seed(state)
        torch.manual_seed(state)
        return build(*words, *more)

    one, again, other = made(1), made(2), made(3, "seed=43")
    assert one.fingerprint == again.fingerprint
    assert one.data_digest == other.data_digest
    assert one.fingerprint != other.fingerprint
    assert one.federation.y.tolist() == [*range(3)] * 20


def test_a_run_without_plugins_knows_nothing_of_an_earlier_runs(folder: Path) -> None:
    before = [list(kind.registry) for kind in plugins.PLUGIN_KINDS.values()]
    for _ in range(2):
        plugins.load_plugins([str(folder / "mine.py")])
        assert [len(kind.registry) for kind in plugins.PLUGIN_KINDS.values()] == [
            len(names) + 1 for names in before
        ]
        assert plugins.SPACES
        plugins.load_plugins([])
        assert [list(kind.registry) for kind in plugins.PLUGIN_KINDS.values()] == before
        assert not plugins.SPACES


ARGUMENTS = """
from __future__ import annotations
import functools, math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Literal
from torch import nn
from fedpfl.methods import FedAvg
from fedpfl.models.mlp import MLP
if TYPE_CHECKING:
    from absent import Odd
@dataclass(frozen=True)
class Mine(FedAvg):
    kind: Literal["a", "b"] = "a"
    rule: Callable = math.exp
    sizes: tuple[int, ...] = field(default_factory=lambda: (1, 2))
    def init(self, params, parts):
        print("method", self.kind, self.rule(0), self.sizes)
        return super().init(params, parts)
class Pulled(FedAvg):
    def __init__(self, mu: float = 0.1):
        self.mu = mu
    def init(self, params, parts):
        print("method", self.mu, self.statistics)
        return super().init(params, parts)
class Layers:
    def __call__(
        self, shape, classes, act=nn.ReLU, width: int = None, odd: Odd = 5,
        folder=Path("b"), *, depth: int = 7
    ):
        print("model", act.__name__, width, odd, folder, depth)
        return MLP(shape, classes)
METHODS = {"mine": Mine, "pulled": Pulled}
MODELS = {"mine": functools.partial(Layers(), depth=8)}
"""


def test_arguments_of_every_kind_arrive(folder: Path, capsys) -> None:
    """What no configuration can hold keeps its default and is no key; the rest can be set."""
    (folder / "mine.py").write_text(ARGUMENTS)
    plugin = format_override("plugins", [folder / "mine.py"])
    words = (plugin, "method=mine", "model=mine", *TINY[:-2])
    plugins.load_plugins([folder / "mine.py"])
    build(*words)
    defaults = capsys.readouterr().out
    assert "method a 1.0 (1, 2)\n" in defaults
    assert "model ReLU None 5 b 8\n" in defaults
    build(*words, "model.width=2", "method.kind=b", "method.sizes=[3]", "model.odd=x")
    changed = capsys.readouterr().out
    assert "method b 1.0 (3,)\n" in changed
    assert "model ReLU 2 x b 8\n" in changed
    build(plugin, "method=pulled", "method.mu=5", *TINY[:-2])
    assert "method 5.0 None\n" in capsys.readouterr().out
    with pytest.raises(FedpflError, match=r"method.mu must be a number, got 'x'"):
        build(plugin, "method=pulled", "method.mu=x", *TINY[:-2])
    told = "model.act is not a key here; known keys of model=mine: "
    (line,) = run_command(*words, "model.act=x", cwd=folder).complaints
    assert told in line


LEAN = """
from lean import half
from kit import tools
from fedpfl.methods import FedAvg
class Mine(FedAvg):
    mu = half() * tools.whole
    def finish(self, server, client, start, end):
        import late
        return end, client
METHODS = {"mine": Mine}
"""
BESIDE = {
    "lean.py": "import json, pack.leaf, tool\nhalf = lambda: 0.5",
    "kit/tools.py": "from . import parts\nfrom .parts import whole",
    "kit/parts.py": "whole = 1.0",
    "late.py": "import lean",
    "pack/__init__.py": "",
    "pack/leaf.py": "",
    "other.py": "whole = 1.0",
    "site-packages/tool.py": "",
}


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder with a file and the modules that it imports, in a hook too."""
    for name in ("kit", "pack", "site-packages"):
        (tmp_path / name).mkdir()
    for name, text in ({"mine.py": LEAN} | BESIDE).items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    plugins.load_plugins([])
    for name in ("lean", "kit", "kit.tools", "kit.parts", "late", "pack", "pack.leaf", "tool"):
        sys.modules.pop(name, None)


def code(*files: Path) -> str:
    return plugins.digest_plugins(plugins.load_plugins(map(str, files)))["mine.py"]


def test_what_a_plugin_imports_from_its_folder_is_part_of_its_code(beside: Path) -> None:
    """And imported anew with it; where the folder lies is not."""
    first = code(beside / "mine.py")
    for name in BESIDE:
        text = (beside / name).read_text()
        changed = text.replace("0.5", "0.75").replace("whole = 1.0", "whole = 10.0")
        (beside / name).write_text(f"{changed}\n")
        is_apart = name in ("other.py", "site-packages/tool.py")
        assert (code(beside / "mine.py") == first) == is_apart, name
        assert METHODS["mine"].mu == {"lean.py": 0.75, "kit/parts.py": 5.0}.get(name, 0.5)
        (beside / name).write_text(text)
        assert code(beside / "mine.py") == first
        assert METHODS["mine"].mu == 0.5
    (beside / "lean.py").write_text("def half(:")
    message = r"mine\.py:2: SyntaxError: invalid syntax \(lean\.py, line 1\)$"
    with pytest.raises(FedpflError, match=message):
        code(beside / "mine.py")


WRONG_FILES = """
absent => No such file or directory; name a Python file that there is
x = 1 => adds nothing; it needs a dictionary METHODS, MODELS, DATASETS, PARTITIONS, METRICS of names
a = 1;;b = c => :2: NameError: name 'c' is not defined
METHODS = {'mine': int} => method=mine: it must be a subclass of fedpfl.methods.Method
MODELS = {'mine': lambda shape, classes, head: 0} => model=mine: its argument head is a key that every choice has
MODELS = {'mine': lambda shape, classes: 0, 'cnn4': int} => model=cnn4: it exists already; choose another name
"""
WRONG_HOOKS = """
finnish(self): pass => finnish is no hook of a method
aggregate(self, server, clients, uploads, weight): pass => aggregate takes (server, clients, uploads, weight) where\
 the contract has (server, clients, net, uploads, weight, generator); change its arguments, and calls of it
"""
WRONG = [
    *((text.replace(";;", "\n"), message) for text, message in read_cases(WRONG_FILES)),
    *(
        (METHOD.format(f"def {text}"), f":3: Mine.{message}")
        for text, message in read_cases(WRONG_HOOKS)
    ),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_what_is_wrong_is_one_line_and_nothing_is_added(text, message, tmp_path):
    file = tmp_path / "mine.py"
    before = [dict(kind.registry) for kind in plugins.PLUGIN_KINDS.values()]
    columns = [*METRICS]
    if text != "absent":
        file.write_text(text)
    with pytest.raises(FedpflError) as error:
        plugins.load_plugins([str(file)])
    assert re.match(
        rf"plugins: {re.escape(str(file))}(: | )?{re.escape(message)}", str(error.value)
    )
    assert [dict(kind.registry) for kind in plugins.PLUGIN_KINDS.values()] == before
    assert ([*METRICS], PLUGIN_MEASURES) == (columns, {})
