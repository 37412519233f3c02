"""Hold a method beside the class that it was ported from: `fedpfl oracle mine.py --against`.

Both have the same samples, minibatches (in the order of samples) and initial parameters. What each
client has before its steps and at its end is noted, so that the place is found where two programs
part. Exit status: 0 they agree, 1 they part, 2 the command or a file must be fixed.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import io
import sys
import tempfile
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fedpfl.check import find_subjects
from fedpfl.config import overrides
from fedpfl.config.plan import check_config
from fedpfl.config.resolution import escape_interpolations
from fedpfl.config.run import Run, build_run
from fedpfl.engine.backends.loop import LoopBackend
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.jobs import TrainJob
from fedpfl.engine.training.step import PureStep
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.seeding import seeded_process
from fedpfl.ground.terminal import Parser, outlive_readers, print_notice
from fedpfl.ground.vision import load_torchvision
from fedpfl.testing.toy import PlaySettings, play_rounds
from fedpfl.testing.trials import compose_choice

VALUES: Any = OmegaConf.load(Path(__file__).with_suffix(".yaml"))
HELP = (
    "Say where a method and a class of PFLlib, HtFLlib or FL-bench part first:"
    " fedpfl oracle mine.py --against PFLlib:FedX method.mu=0.5 --theirs mu=0.5"
)
LARGEST_ROUNDING = 1e-5
"""Differences up to this come from the order in which float32 numbers are added."""
SERVER = -1
"""Stands for a client's number in notes."""


Entries = list[dict[str, Tensor]]


class Notes(defaultdict[tuple[int, int], Entries]):
    """By round and client: entries before each step and in the end; the server's at first."""

    def add(self, round_number: int, client: int, entries: Iterable[tuple[Any, Tensor]]) -> None:
        """Note entries as they are now."""
        copies = {str(name): entry.detach().clone() for name, entry in entries}
        self[round_number, client].append(copies)


@contextlib.contextmanager
def note_loop(notes: Notes) -> Iterator[None]:
    """Note what fedpfl has, and let it take minibatches in the order of samples."""
    take_step, train = PureStep.__call__, LoopBackend._train

    def note_step(step: PureStep, state: Any, minibatch: Any, number: int = 0) -> Any:
        notes.add(step.job.draws[0].round, step.job.rows[0].client, tree.items(state.params))
        return take_step(step, state, minibatch, number)

    def note_ends(backend: LoopBackend, net: Any, job: TrainJob, stop: Any) -> Any:
        result = train(backend, net, job, stop)
        notes.add(job.draws[0].round, job.rows[0].client, tree.items(result.params))
        notes.add(job.draws[0].round, SERVER, tree.items(job.server))
        return result

    with (
        mock.patch.object(PureStep, "__call__", note_step),
        mock.patch.object(LoopBackend, "_train", note_ends),
        mock.patch.object(Draws, "order", lambda *arguments: torch.arange(arguments[-1])),
    ):
        yield


class Problem:
    """Hold the samples, clients and network that both sides train on.

    Attributes:
        parts: For each client its samples' numbers, by split.
    """

    def __init__(self, run: Run):
        self.run, federation = run, run.federation
        self.images, self.labels = federation.normalize(federation.x), federation.y
        self.parts: list[dict[str, list[int]]] = []
        for client in range(federation.clients):
            splits = (federation.train, federation.test, federation.validation)
            numbers = [split[client].tolist() if split else [] for split in splits]
            self.parts.append(dict(zip(("train", "test", "val"), numbers, strict=True)))

    def make_network(self) -> Any:
        """Return the network before round 1 in two parts, `base` and `classifier`."""
        net, network = self.run.net, nn.Module()
        network.base = net.copy_module()
        network.base.load_state_dict(net.state_dict({**net.fixed, **net.params, **net.buffers}))
        network.classifier = network.base.get_submodule(net.parts.head_layer)
        network.base.set_submodule(net.parts.head_layer, nn.Identity())
        return network


# ---- The libraries' own servers and clients, which change the process that they are in


def import_peer(name: str) -> Any:
    """Import a module of the checkout, to replace its attributes."""
    return importlib.import_module(name)


class Driver:
    """Hold the common parts of all libraries' drivers.

    Args:
        folder: Of the modules that are imported.
        problem: What servers and clients train on.
    """

    def __init__(self, folder: Path, problem: Problem):
        self.folder, self.problem, self.notes, self.round = folder, problem, Notes(list), 0
        self.cohorts = [*problem.run.draw_cohorts()]
        load_torchvision()
        for name in VALUES.unused:
            with contextlib.suppress(ImportError):
                import_peer(name)
            sys.modules.setdefault(name, mock.MagicMock())
        sys.path.insert(0, str(folder))
        load = torch.utils.data.DataLoader

        def load_in_order(data: Any, size: int = 1, *_: Any, batch_size: int = 0, **__: Any) -> Any:
            return load(data, batch_size or size)

        torch.utils.data.DataLoader = load_in_order  # type: ignore[misc, assignment]

    def prepare(self, server: Any) -> None:
        """Change a server before its first round."""

    def look(self, server: Any) -> None:
        """Look at a server between rounds."""

    def read_options(self, library: str, options: dict[str, Any]) -> Any:
        """Return a library's options by the run's keys, some of them as they are told."""
        values = OmegaConf.merge(self.problem.run.config, {"theirs": VALUES[library]}).theirs
        for key, value in options.items():
            OmegaConf.update(values, key, value, force_add=True)
        return OmegaConf.to_container(values, resolve=True)

    def train(
        self, train: Callable[..., Any], find_model: Callable[[], Any], client: int, *inputs: Any
    ) -> Any:
        """Let a client train, and note each step's parameters and the final model."""

        def note(optimizer: Any, *_: Any) -> None:
            entries = [entry for group in optimizer.param_groups for entry in group["params"]]
            self.notes.add(self.round, client, enumerate(entries))

        hook = register_optimizer_step_pre_hook(note)
        answer = train(*inputs)
        hook.remove()
        self.notes.add(self.round, client, find_model().named_parameters())
        return answer


class FlcoreLibrary(Driver):
    """Drive PFLlib, or HtFLlib, which has its models in files."""

    def __init__(self, folder: Path, problem: Problem):
        super().__init__(folder / "system", problem)
        import_peer("utils.data_utils").read_client_data = self._read_samples
        self._split_type = import_peer("flcore.trainmodel.models").BaseHeadSplit
        clients = import_peer("flcore.clients.clientbase")
        self._load_item = getattr(clients, "load_item", None)
        self._scratch = tempfile.TemporaryDirectory()
        torch.load = partial(torch.load, weights_only=False)

        def build(model: Any, *_: Any, **__: Any) -> None:
            nn.Module.__init__(model)
            network = problem.make_network()
            model.base, model.head = network.base, network.classifier

        self._split_type.__init__ = build

    def play(self, name: str, **options: Any) -> None:
        """Train.

        Args:
            name: Of the server's class.
            options: Of the main program.
        """
        server_type = self._find_server_type(name)
        cohorts = [*self.cohorts, self.cohorts[-1]]  # one more round is played than is asked for

        def select(server: Any) -> list[Any]:
            self.round += 1
            model = getattr(server, "global_model", None)
            self.notes.add(self.round, SERVER, model.named_parameters() if model else ())
            return [server.clients[client] for client in cohorts[self.round - 1]]

        for hook in ("evaluate", "evaluate_personalized", "evaluate_one_step"):
            setattr(server_type, hook, lambda server, *_, **__: self.look(server))
        server_type.save_results = server_type.save_global_model = lambda server: None
        server_type.select_clients = select
        # Its servers shuffle uploads by the process's generators.
        with seeded_process(0):
            server = server_type(self._make_arguments(options), 0)
            server.rs_test_acc = server.rs_test_acc_per = [0]
            self.prepare(server)
            for client in [client for client in server.clients if hasattr(client, "train")]:
                find_model = partial(self._find_model, client)
                client.train = partial(self.train, client.train, find_model, client.id)
            server.train()

    def _find_server_type(self, name: str) -> Any:
        """Import the class. Raises FedpflError where no file defines it."""
        for file in self.folder.glob("flcore/servers/*.py"):
            if f"class {name}(" in file.read_text():
                return getattr(import_peer(f"flcore.servers.{file.stem}"), name)
        raise FedpflError(f"no file of {self.folder}/flcore/servers has a class {name}")

    def _make_arguments(self, options: dict[str, Any]) -> Any:
        """Return the main program's options."""
        parser = ArgumentParser()
        for node in ast.walk(ast.parse((self.folder / "main.py").read_text())):
            if isinstance(node, ast.Expr) and "parser.add_argument(" in ast.unparse(node):
                eval(ast.unparse(node), {"parser": parser})
        model = self._split_type()
        arguments = parser.parse_args([])
        arguments.num_classes = self.problem.run.federation.classes
        arguments.model, arguments.head = model, copy.deepcopy(model.head)
        arguments.save_folder_name = self._scratch.name
        arguments.global_rounds = len(self.cohorts)
        arguments.join_ratio = len(self.cohorts[0]) / len(self.problem.parts)
        vars(arguments).update(self.read_options("pfllib", options))
        return arguments

    def _find_model(self, client: Any) -> Any:
        if self._load_item:
            return self._load_item(client.role, "model", client.save_folder_name)
        return client.model

    def _read_samples(self, dataset: str, client: int, is_train: bool = True, **_: Any) -> Any:
        part = self.problem.parts[client]
        chosen = part["train"] + part["val"] if is_train else part["test"]
        return [*zip(self.problem.images[chosen], self.problem.labels[chosen], strict=True)]


class Bench(Driver):
    """Drive FL-bench."""

    def play(self, name: str, **options: Any) -> None:
        """Train.

        Args:
            name: Of the method.
            options: Of the method, or with dots of the whole configuration.
        """
        # ---- Step 1: the server, as its modules know the problem
        name = name.lower()
        module = import_peer(f"src.server.{name}")
        server_type = {key.lower(): value for key, value in vars(module).items()}[f"{name}server"]
        self._add_problem()
        defaults = import_peer("src.utils.constants").DEFAULTS
        options = {key if "." in key else f"{name}.{key}": options[key] for key in options}
        values = self.read_options("flbench", {"method": name, name: {}, **options})
        arguments = import_peer("src.utils.functional").parse_args(
            OmegaConf.merge(defaults, values),
            name,
            getattr(server_type, "get_hyperparams", None),
        )
        server = server_type(args=arguments)
        self.prepare(server)

        # ---- Step 2: its rounds
        worker = server.trainer.worker
        train = worker.train
        worker.train = lambda package: self.train(
            train, lambda: worker.model, package["client_id"], package
        )
        for cohort in self.cohorts:
            server.current_epoch, server.selected_clients = self.round, list(cohort)
            self.round += 1
            self.notes.add(self.round, SERVER, server.public_model_params.items())
            server.train_one_round()
            self.look(server)

    def _add_problem(self) -> None:
        """Let it find the samples, their split and the network."""
        parts = self.problem.parts
        clients = list(range(len(parts)))
        separation = dict.fromkeys(("train", "val", "test"), clients) | {"total": len(clients)}
        indices = [{key: np.array(part[key], int) for key in part} for part in parts]
        partition = {"separation": separation, "data_indices": indices}
        dataset: Any = torch.utils.data.TensorDataset(self.problem.images, self.problem.labels)
        dataset.data, dataset.targets = dataset.tensors
        dataset.train = dataset.eval = lambda: None
        import_peer("data.utils.datasets").DATASETS["mnist"] = lambda **_: dataset
        module = import_peer("src.server.fedavg")
        module.open = lambda *_: io.StringIO('{"split": "sample"}')
        module.pickle = SimpleNamespace(load=lambda file: partition)
        runtime = SimpleNamespace(runtime=SimpleNamespace(output_dir="."))
        module.HydraConfig = SimpleNamespace(get=lambda: runtime)
        networks, network = import_peer("src.utils.models"), self.problem.make_network()
        model = networks.DecoupledModel()
        model.base, model.classifier = network.base, network.classifier
        networks.MODELS["mlp"] = lambda **_: copy.deepcopy(model)


def open_library(folder: Path, problem: Problem) -> FlcoreLibrary | Bench:
    """Return the driver of a checkout. Raises FedpflError for an unknown library."""
    if (folder / "system" / "flcore").is_dir():
        return FlcoreLibrary(folder, problem)
    if (folder / "src" / "server").is_dir():
        return Bench(folder, problem)
    raise FedpflError(f"{folder} is no checkout of PFLlib, HtFLlib or FL-bench")


# ---- Where two programs part


def measure_differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Measure their entries' distance from the nearest of ours in shape, by its name."""
    differences: dict[str, float] = {}
    for entry in theirs.values():
        distances = {}
        for name in [name for name in ours if ours[name].shape == entry.shape]:
            difference = (ours[name].double() - entry.double()).abs()
            # nan is a difference, which max() would lose.
            distances[name] = difference.nan_to_num(nan=np.inf).max().item()
        if distances:
            name = min(distances, key=distances.__getitem__)
            differences[name] = max(distances[name], differences.get(name, 0.0))
    return differences


def find_parted(ours: Entries, theirs: Entries, place: int) -> str:
    """Describe the first entry that is further apart than rounding, "" without any."""
    for name, difference in measure_differences(ours[place], theirs[place]).items():
        if difference > LARGEST_ROUNDING:
            return f"{name} by {difference:.2g}"
    return ""


def name_hook(number: int, client: int, ours: Notes, theirs: Notes) -> str:
    """Name the hook of a client's round where two programs part, "" without any."""
    mine, other = ours[number, client], theirs[number, client]
    if text := find_parted(mine, other, 0):
        if find_parted(ours[number, SERVER], theirs[number, SERVER], 0):
            return f"finish or aggregate of round {number - 1}: {text}"
        return f"download or start: {text}"
    if not (text := find_parted(mine, other, -1)):
        return ""
    if len(mine) != len(other):
        return f"phases ({len(mine) - 1} steps here, {len(other) - 1} there): {text}"
    step = next(place for place in range(len(mine)) if find_parted(mine, other, place))
    return f"loss of step {step}: {find_parted(mine, other, step)}"


def compare_notes(ours: Notes, theirs: Notes) -> tuple[bool, str]:
    """Compare clients' models at the beginning and end of rounds; describe the outcome.

    Raises:
        FedpflError: They have no entry of one shape.
    """
    differences: list[float] = []
    for number, client in sorted(key for key in ours if key[1] != SERVER and theirs[key]):
        if hook := name_hook(number, client, ours, theirs):
            return False, f"they part in round {number}, client {client}, {hook}"
        for place in (0, -1):
            mine, other = ours[number, client][place], theirs[number, client][place]
            differences += measure_differences(mine, other).values()
    if not differences:
        raise FedpflError("the two have no entry of one shape, so nothing can be compared")
    return True, f"equal to {max(differences):.0e} over {max(ours)[0]} rounds"


# ---- The command


def main(arguments: list[str] | None = None) -> int:
    """Print how a method and a class agree or part; return the exit status."""
    parser = Parser(prog="fedpfl oracle", description=HELP)
    parser.add_argument("what", help="a Python file (docs/extend.md), or a method's name")
    parser.add_argument("values", nargs="*", metavar="KEY=VALUE", help="as `fedpfl.train` has them")
    parser.add_argument(
        "--against", required=True, metavar="DIR:CLASS", help="its checkout, and it"
    )
    parser.add_argument(
        "--theirs", action="append", default=[], metavar="KEY=VALUE", help="its options"
    )
    options = parser.parse_intermixed_args(arguments)
    try:
        agrees, text = _play_both(options)
    except FedpflError as error:
        print_notice(error)
        return 2
    print(text)
    return int(not agrees)


def _play_both(options: Any) -> tuple[bool, str]:
    """Play a method and a class. Raises FedpflError."""
    methods = [one.name for one in find_subjects(options.what, []) if one.kind == "method"]
    defaults = [f"{key}={value}" for key, value in VALUES.problem.items()]
    words = [*defaults, *(f"method={name}" for name in methods), *options.values]
    if options.what.endswith(".py"):
        words += overrides.format_words("plugins", [options.what])
    chosen_words = {word.partition("=")[0]: word for word in words}
    config = compose_choice(options.what, [*chosen_words.values()])
    run = build_run(check_config(escape_interpolations(config)))
    settings = PlaySettings(run.engine, run.local, run.settings.seed)
    ours = Notes(list)
    with note_loop(ours):
        cohorts = [*run.draw_cohorts()]
        play_rounds(run.method, run.net, run.federation, cohorts, settings)
    folder, _, name = options.against.rpartition(":")
    driver = open_library(Path(folder), Problem(run))
    theirs = [word.partition("=") for word in options.theirs]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            driver.play(name, **{key: yaml.safe_load(value) for key, _, value in theirs})
    except FedpflError:
        raise
    except Exception as error:  # it may fail in any way
        raise FedpflError(f"{options.against}: {error_text(error, with_class=True)}") from error
    return compare_notes(ours, driver.notes)


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
