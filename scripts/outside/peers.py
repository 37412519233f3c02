"""How a peer's code is brought, imported and, where it departs from its method, put right."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.util
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple
from unittest import mock

from fedpfl.ground.vision import load_torchvision

COMMITS = {
    "TsingZ0/PFLlib": "d832e76f6a23b833038949ec1e4fdefe63a4d350",
    "TsingZ0/HtFLlib": "e959261d906f40377410bc4d9d13ba3f6af56782",
    "KarhouTam/FL-bench": "06e658bca5af6ce732e25bb7c0f8be321e14a85e",
    "uglyghost/FedOBP": "b55d0fae8f46905c7c087425df3bda44a6fd24b0",
    "uglyghost/FedOBP_CODE": "d433fcda9260c6fa9bc505112620d69d1b4a850c",
    "lapisrocks/fedselect": "0949f8a50aa5f2efe342e3674573a6468d84a45b",
    "HikariX/FedPURIN": "2cefe0b397982d63e384d89b45f98c54eb82798a",
    "kxzxvbk/Fling": "f6c6f1e7c49f9341587bee2c95f1a31e63176bee",
    "lxcnju/FedRepo": "617ee015046409d95dbd76ba39eebb92d313ab94",
    "xiyuanyang45/DynamicPFL": "4461ecb27d63bf7c9693affaf5c4f66f9d3704bc",
    "ljaiverson/pFL-APPLE": "8078196731b5493ab408fff4fe80f058e2e538f4",
    "omarfoq/knn-per": "ee1752027798e8ab8f57f77c6ee74f946c0f4cd7",
    "dennis-grinwald/floco": "a25b3a1793944b14b8804e4843443152e7b15bf2",
    "diaoenmao/HeteroFL-Computation-and-Communication-Efficient-Federated-Learning-for-"
    "Heterogeneous-Clients": "cc40f3e46b0fab5364d62a1bb623d3764daf179d",
    "AIoT-MLSys-Lab/FedRolex": "813510997e1802eb756d53baa4229c90ce5ac008",
    "ZiruNiu0/FedSPU": "a84aee82a31e9e0e6d6ee28367ef48e550f8801b",
    "jichan3751/ifca": "61e44b8977a53c25368e8120aac6a505496ebbdf",
    "Roland4396/FlexFL-main": "1e523a264e0baf53eaf295e0ef4c2d00ccd28c8c",
    "cj-mclaughlin/pFedFDA": "73c7c407a49575636bcda222968a2a4ddf73a68a",
    "zhuangdizhu/FedGen": "dd5807c5625404e99035d97e2ef8c712c2e007a6",
    "tian0920/SeqFedEDT": "1e8378ef7ed951f338eada2fd486da422e274d1c",
    "jmbian/FedALT": "8be3dde2569cef47ecab2d7d931667606a921a47",
    "Pengxin-Guo/FedSA-LoRA": "fc276b5ead4208c75fb0b2dd16923f307afb3acd",
    "alibaba/FederatedScope": "1cb1ab76bf4c9394d617c4c5a800cb0df145796d",
    "ATP-1010/FederatedLLM": "7bea15826bc0de37da35e44bc34a39274e3cc09f",
    "CERT-Lab/fedex-lora": "2fa2e4a243f93c829e2b601e459e45aa748e4149",
    "cliffsofthestream/SDFLoRA": "663e2a9dccca7e8d830ef001f47d0bec7d77a3f6",
}
"""The peers' repositories on GitHub, and the commit of each that was driven."""

Repair = tuple[str, str]
"""What stands in a peer's source, and what is put in its place."""


class Comparison(NamedTuple):
    """Say what of a method is held beside which peer.

    Attributes:
        method: its name in fedpfl.
        repository: OWNER/NAME.
        detail: the setting.
        undone: what departs from the method in the peer's code, and was put right in memory.
        play: plays both; returns the models after each round, first fedpfl's.
    """

    method: str
    repository: str
    detail: str
    undone: str
    play: Callable[[Any], tuple[Any, Any]]

    @property
    def name(self) -> str:
        """Return what one types to choose it."""
        return " ".join(filter(None, (self.method, self.repository, self.detail)))


class BringingError(Exception):
    """What keeps a peer's code from being had, in one line."""


def bring_checkout(repository: str, checkouts: Path | None, folder: Path) -> Path:
    """Return a work tree of a repository at its pinned commit; a clone is made once.

    Args:
        repository: OWNER/NAME.
        checkouts: has git repositories as OWNER/NAME; None: they are cloned from GitHub.
        folder: in which clones are made.

    Raises:
        BringingError: where git can't.
    """
    target = folder / repository
    source = [f"https://github.com/{repository}", "--filter=blob:none"]
    if checkouts is not None:
        source = [str((checkouts / repository).resolve())]
    if not (target / ".git").exists():
        run_git("clone", "--quiet", "--no-checkout", *source, str(target))
    # Code alone: some repositories have hundreds of megabytes of samples beside it.
    run_git("-C", str(target), "checkout", "--quiet", COMMITS[repository], "--", "*.py")
    return target


def run_git(*arguments: str) -> None:
    """Run git. Raises BringingError with its last line."""
    result = subprocess.run(["git", *arguments], capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["git failed without a word"]
        raise BringingError(lines[-1])


# ---- Importing


class PackageStub(ModuleType):
    """A package that a peer imports and the problem has no use for."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        """Return something that can be called."""
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find a stub for these packages where they are not installed."""

    def __init__(self, packages: tuple[str, ...]):
        self.packages = packages

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return a spec for the packages and whatever is in them."""
        if fullname.split(".")[0] in self.packages:
            return importlib.util.spec_from_loader(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        """Return the stub."""
        return PackageStub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the stub as it is."""


def stub_packages(*packages: str) -> None:
    """Let these packages be imported also where they are not installed."""
    sys.meta_path.append(StubFinder(packages))


def open_checkout(folder: Path, *packages: str) -> None:
    """Let a peer's modules be imported by their names, with stubs for packages."""
    load_torchvision()
    stub_packages(*packages)
    sys.path.insert(0, str(folder))


def load_file(name: str, path: Path, repairs: tuple[Repair, ...] = ()) -> ModuleType:
    """Import one file as the module `name`, its source repaired in memory."""
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    run_source(path.read_text(), module, repairs)
    return module


def repair_module(name: str, *repairs: Repair) -> ModuleType:
    """Run an imported module's source again, repaired, in the same module."""
    module = importlib.import_module(name)
    run_source(Path(str(module.__file__)).read_text(), module, repairs)
    return module


def run_source(source: str, module: ModuleType, repairs: tuple[Repair, ...]) -> None:
    """Run repaired source in a module. Raises ValueError where there is nothing to repair."""
    for wrong, right in repairs:
        if wrong not in source:
            raise ValueError(f"{module.__name__} has no {wrong!r} any more")
        source = source.replace(wrong, right)
    exec(compile(source, str(module.__file__), "exec"), module.__dict__)


def define_in(scope: dict[str, Any], path: Path, *names: str) -> dict[str, Any]:
    """Run only these functions and classes of a file whose imports can't be had.

    Args:
        scope: what they look up, and where they are put.
        path: of the file.
        names: of what stands at its top.

    Returns:
        The scope.
    """
    tree = ast.parse(path.read_text())
    wanted = [node for node in tree.body if getattr(node, "name", None) in names]
    if len(wanted) != len(names):
        raise ValueError(f"{path} does not define all of {', '.join(names)}")
    tree.body = wanted
    exec(compile(tree, str(path), "exec"), scope)
    return scope


class Lens:
    """Show a module as it is but for some attributes."""

    def __init__(self, module: Any, **attributes: Any):
        self.__dict__.update(attributes)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        """Return the module's."""
        return getattr(self._module, name)


@contextlib.contextmanager
def be_quiet() -> Iterator[None]:
    """Keep what a peer prints, and print its end where it fails."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield
    except BaseException:
        sys.stderr.write(said.getvalue()[-2000:])
        raise
