"""Imports run one way, from room to room as RANK has them."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedpfl.__main__ import COMMANDS
from tests.conftest import ROOT

PACKAGE = ROOT / "fedpfl"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")

ROOMS = (
    *("ground", "data models privacy system", "methods robust", "engine", "record", "report"),
    *("config", "testing", "runner", "remote papers", "commands"),
)
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms.split()}
"""Rooms from the ground up; the commands are the modules of fedpfl/ itself, and report's."""


def part(path: Path) -> str:
    """The room that a file stands in."""
    first, *rest = path.relative_to(PACKAGE).parts
    return first if rest and path.stem != "__main__" else "commands"


def list_statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements below a node, without their expressions, which hold no import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from list_statements(child)


@functools.cache
def imports(path: Path) -> list[tuple[str, str | None]]:
    """(module, name) of every import, all absolute; no name for `import module`."""
    found: list[tuple[str, str | None]] = []
    for node in list_statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [(node.module, alias.name) for alias in node.names]
    return found


def parts_imported(path: Path) -> set[str]:
    """Parts of fedpfl that the file imports from."""
    parts = set()
    for module, name in imports(path):
        top, *rest = module.split(".")
        room = rest[0] if rest else name
        if top == "fedpfl" and room not in ("__version__", None):
            parts.add(room if room in RANK else "commands")
    return parts


def files(*names: str) -> list[Path]:
    return [path for path in FILES if part(path) in names]


def test_every_room_has_its_place():
    assert {part(path) for path in FILES} == {*RANK}


def test_only_commands_stand_in_the_hallway():
    modules = {"__init__", "__main__", *COMMANDS} - {"report"}
    told = "each fedpfl/*.py has a line in COMMANDS of fedpfl/__main__.py"
    assert {path.stem for path in PACKAGE.glob("*.py")} == modules, told


@pytest.mark.usefixtures("without_collections")
def test_imports_point_down():
    for path in FILES:
        here = part(path)
        upward = {other for other in parts_imported(path) - {here} if RANK[other] >= RANK[here]}
        assert not upward, f"{path} imports {upward}"
        assert here != "report" or parts_imported(path) <= {"report", "ground", "record"}, path


HYDRA = {"hydra", "omegaconf"}
OUTSIDE = HYDRA | {"os", "pathlib", "yaml", "numpy", "torchvision", "wandb"}
"""Files, devices and configuration."""


def test_methods_know_nothing_outside_and_only_configuration_and_training_know_hydra():
    """Torch's own pytree is nobody's: fedpfl.ground.tree has the operations on trees."""
    closed = {
        *files("methods", "models"),
        *(PACKAGE / f"ground/{name}.py" for name in ("tree", "traffic")),
    }
    for path in FILES:
        packages = {module.split(".")[0] for module, _ in imports(path)}
        assert not (path in closed and packages & OUTSIDE), path
        knows_hydra = part(path) in ("config", "runner", "testing", "commands")
        assert knows_hydra or not packages & HYDRA, path
        assert not any("pytree" in module for module, _ in imports(path)), path


CONTRACT = "FACTS STORED ORDER SEES METHODS LONGEST_CHUNK Batch Data Method Phase Shard Turn argument_order_fault"
REGISTERED = {path.stem for path in (PACKAGE / "methods").glob("*.py")} - {"__init__"}


def test_the_engine_knows_no_methods_name():
    assert len(REGISTERED) > 30
    for path in files("engine", "data", "models", "record"):
        for module, name in imports(path):
            if module.startswith("fedpfl.methods"):
                assert module == "fedpfl.methods", f"{path} imports {module}"
                assert name in CONTRACT.split(), f"{path} imports {name}"
        texts = {*re.findall(r"[\"'](\w+)[\"']", path.read_text())}
        assert not texts & REGISTERED, f"{path} names {texts & REGISTERED}"


GROUND = tuple(
    f"fedpfl.ground.{room}" for room in ("tree", "errors", "ranges", "casting", "tasks", "survival")
)
METHOD_PARTS = (*GROUND, "fedpfl.models", "fedpfl.methods.shared")


def test_a_method_is_made_of_models_trees_and_what_methods_share():
    other_methods = {f"fedpfl.methods.{method}" for method in REGISTERED}
    for path in files("methods"):
        is_shared = path.parent.name == "shared"
        if path.stem == "__init__" and not is_shared:
            continue
        for module, name in imports(path):
            module = f"{module}.{name}" if module in ("fedpfl", "fedpfl.ground") else module
            is_method = not is_shared and module in other_methods
            is_allowed = is_method or module.startswith(METHOD_PARTS)
            assert is_allowed or module.split(".")[0] != "fedpfl", f"{path} imports {module}"


def run_code(code: str) -> str:
    """The last line that a process of its own prints."""
    pipes = {"capture_output": True, "text": True, "cwd": ROOT, "timeout": 120}
    result = subprocess.run([sys.executable, "-c", code], **pipes)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def loaded_by(names: str) -> list[str]:
    """The modules that are there after `import names`."""
    return ast.literal_eval(run_code(f"import sys, {names}; print([*sys.modules])"))


def test_the_report_never_loads_torch():
    """And matplotlib late."""
    modules = ("report", "report.html", "report.figures", "report.__main__", "__main__")
    loaded = loaded_by(", ".join(f"fedpfl.{name}" for name in modules))
    assert not {"torch", "matplotlib", "hydra"} & {*loaded}
    own = {name.split(".")[1] for name in loaded if name.startswith("fedpfl.")}
    assert own <= {"report", "ground", "record", "papers", "__main__"}


def test_importing_the_package_is_cheap():
    """What `fedpfl.run` and `fedpfl.load` need comes with the first of them."""
    loaded = [name for name in loaded_by("fedpfl; dir(fedpfl)") if name.startswith("fedpfl.")]
    assert loaded == ["fedpfl.ground", "fedpfl.ground.errors"]


NEEDED = "torch torchgen numpy cython_runtime hydra hydra_plugins omegaconf antlr4 yaml packaging attr tqdm"
NEEDED += (
    " pydantic pydantic_core annotated_types typing_extensions typing_inspection safetensors fedpfl"
)
MODULES = 1_800
"""1,717 on Python 3.11, of which torch has 1,122."""


def test_a_run_imports_what_it_needs(tmp_path):
    """Its start is counted in modules, as seconds are the machine's. It looks for no garbage among
    them, which took a sixth of the start.
    """
    words = [
        "dataset=digits",
        "partition=iid",
        "clients=4",
        "model=mlp",
        "rounds=2",
        "local.epochs=5",
    ]
    code = f"""
import gc, runpy, sys
sys.argv[1:] = {[*words, f"hydra.run.dir='{tmp_path}'"]}
runpy.run_module("fedpfl.train", run_name="__main__", alter_sys=True)
buffer = sys.stdout.buffer  # python -u has no buffer
stream = type(getattr(buffer, "raw", buffer)).__name__
print([[*sys.modules], gc.isenabled(), gc.get_freeze_count(), stream])
"""
    loaded, is_collecting, frozen, stream = ast.literal_eval(run_code(code))
    # torch takes these where an extra or CUDA has brought them.
    loaded = [name for name in loaded if name.split(".")[0] not in ("dill", "triton")]
    packages = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names
    assert {name for name in packages if not name.startswith("_")} <= {*NEEDED.split()}
    assert not [name for name in loaded if name.startswith(("torch._dynamo", "torch._inductor"))]
    assert len(loaded) < MODULES
    assert is_collecting
    assert frozen > 100_000
    assert stream == "_LossyStream"  # its reader may leave
