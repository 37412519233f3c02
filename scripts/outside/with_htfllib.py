"""HtFLlib's servers and clients on the common problem, with networks of three kinds."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

import fedpfl
from fedpfl import oracle
from fedpfl.ground import tree
from fedpfl.methods import METHODS
from outside.peers import Comparison, Repair, repair_module
from outside.plain import Keeper
from outside.problem import CLASSES, CLIENTS, FEATURES, Models, Problem, name_entries

REPOSITORY = "TsingZ0/HtFLlib"
ROUNDS = 3
WIDTH = 12
"""Of the features that all heads read; the first two kinds pool theirs."""
HIDDEN = ((16,), (24,), (20, WIDTH))
SAVE = "        save_item(model, self.role, 'model', self.save_folder_name)\n"
"""How a client of HtFLlib keeps its network."""


class Case(NamedTuple):
    """Say what is compared.

    Attributes:
        method: in fedpfl.
        server: in HtFLlib, CLIENT MODULE and CLASS.
        options: of HtFLlib's main program.
        settings: of fedpfl's method.
        prefix: of a network's entries in a personal model; `{part}` is body or head.
        common: the hidden layer of the common network, which HtFLlib averages with equal weights.
        extra: what a client keeps beside, by the name of HtFLlib's file.
        undone: what departs from the method in HtFLlib, and is put right in memory.
        repairs: of the client's module.
    """

    method: str
    server: str
    options: Mapping[str, Any] = MappingProxyType({})
    settings: str = ""
    prefix: str = ""
    common: int = 0
    extra: Mapping[str, str] = MappingProxyType({})
    undone: str = ""
    repairs: tuple[Repair, ...] = ()


def detach(name: str) -> Repair:
    """Return the repair of a teacher's logits that have a gradient."""
    return f"softmax({name}, dim=1))", f"softmax({name}.detach(), dim=1))"


CASES = (
    Case("local_only", "local.Local"),
    Case("lg_fedavg", "lg.LG_FedAvg"),
    Case("fedproto", "proto.FedProto", {"lamda": 2.0}, "lam=2 prototypes=all_epochs", "model."),
    Case("fd", "fd.FD", {"lamda": 0.1}, "lam=0.1 outputs=logits teacher=all"),
    Case(
        *("fedgh", "gh.FedGH", {"server_epochs": 7, "server_learning_rate": 0.2}),
        "server_epochs=7 server_batch=16 server_lr=0.2",
    ),
    Case(
        *("fedtgp", "tgp.FedTGP", {"lamda": 2.0, "server_epochs": 7, "margin_threthold": 0.5}),
        *("lam=2 server_epochs=7 server_batch=16 server_lr=0.1 tau=0.5", "model."),
        undone="prototypes are of the model before training",
        repairs=(
            (f"        self.collect_protos()\n{SAVE}", f"{SAVE}        self.collect_protos()\n"),
        ),
    ),
    Case(
        *("fml", "fml.FML", {"alpha": 0.6, "beta": 0.3}, "alpha=0.6 beta=0.3"),
        common=WIDTH,
        undone="KL is divided by the classes too, and has a gradient in its teacher",
        repairs=(
            ("KLDivLoss()", "KLDivLoss(reduction='batchmean')"),
            *(detach("output_g"), detach("output")),
        ),
    ),
    Case(
        *("fedkd", "kd.FedKD", {"mentee_learning_rate": 0.1, "T_start": 0.7, "T_end": 0.9}),
        "compress=parameters energy_start=0.7 energy_end=0.9",
        common=WIDTH,
        extra={"W_h": "map"},
        undone="a matrix that needs all its singular values is dropped",
        repairs=(("range(len(sigma))", "range(len(sigma) + 1)"),),
    ),
    Case(
        *("fedmrl", "mrl.FedMRL", {"sub_feature_dim": 8}, "", "{part}."),
        common=8,
        extra={"proj": "projector"},
        undone="the projector is the initial one again in each round",
        repairs=((SAVE, SAVE + SAVE.replace("model", "proj")),),
    ),
)


@contextlib.contextmanager
def keep_beginning(method_type: Any) -> Iterator[dict[str, Any]]:
    """Let a method of fedpfl put what it begins with into what is yielded."""
    kept: dict[str, Any] = {}
    begin = method_type.init

    def begin_and_keep(method: Any, params: Any, parts: Any) -> Any:
        server, client = begin(method, params, parts)
        kept.setdefault("server", server)
        kept.update(client=client, kinds=parts.kinds, common=parts.common)
        return server, client

    method_type.init = begin_and_keep
    yield kept
    method_type.init = begin


def play_ours(case: Case, problem: Problem) -> list[Models]:
    """Return fedpfl's models after each round."""
    kinds = ", ".join(f"{{name: mlp, hidden: {[*hidden]}}}" for hidden in HIDDEN)
    words = [f"method.{word}" for word in case.settings.split()]
    words += [f"method={case.method}", "model=mixed", f"model.kinds=[{kinds}]"]
    words.append(f"model.features={WIDTH}")
    if case.common:
        words.append(f"model.common={{name: mlp, hidden: [{case.common}]}}")
    rest = problem._fill_settings(ROUNDS, [*words, "model.weights", "model.hidden"])
    taken = []
    with oracle.note_loop(oracle.Notes(list)):
        for played in fedpfl.rounds(*words, directory=str(problem.folder / "ours"), **rest):
            state = played._state
            models: Models = {}
            for client in range(CLIENTS):
                models.update(name_entries(f"{client}/", played.personal(client)))
                own = tree.select(state.client(client), case.extra.values())
                models.update(name_entries(f"{client}/", dict(tree.items(own))))
            common = dict(tree.items(state.server.get("common", {})))
            models.update(name_entries("server/", common))
            taken.append(models)
    return taken


class Library(Keeper, oracle.FlcoreLibrary):
    """Drive a checkout of HtFLlib from where fedpfl began."""

    def __init__(self, folder: Path, problem: Problem, case: Case, beginning: Mapping[str, Any]):
        super().__init__(folder, problem)
        # A function, which gets the network as `self`.
        self._split_type.__init__ = lambda *given, **more: self._build(*given, **more)
        self.case, self.files = case, importlib.import_module("flcore.clients.clientbase")
        repair_module(f"flcore.clients.client{case.server.split('.')[0]}", *case.repairs)

        # ---- Its files, and for each the entries in fedpfl that it begins with.
        kinds = beginning["kinds"]
        self.modules: dict[tuple[str, str], tuple[str, Any]] = {}
        for client in range(CLIENTS):
            role, kind = f"Client_{client}", kinds[client % len(HIDDEN)]
            named = {case.prefix.format(part=name[:4]) + name: leaf for name, leaf in kind.items()}
            self.modules[role, "model"] = f"{client}/", named
            for item, entry in case.extra.items():
                own = dict(tree.items({entry: beginning["client"][entry]}))
                self.modules[role, item] = f"{client}/", own
        common = dict(tree.items(beginning["server"].get("common", {})))
        head = tree.select(kinds[0], ("head.weight", "head.bias"))
        maker = beginning["server"].get("maker", {})
        # FedKD's server keeps the student in factors; clients have it.
        owners = [f"Client_{client}" for client in range(CLIENTS) if case.method == "fedkd"]
        for role in owners or ["Server"] * bool(common):
            self.modules[role, "global_model"] = "server/", common
        self.begun = {
            **self.modules,
            ("Server", "head"): ("", head),
            ("Server", "TGP"): ("", maker),
        }

    def _build(
        self, model: Any, arguments: Any = None, client: int = 0, _: int = 0, **more: Any
    ) -> None:
        """Make a kind of network, or the common one, in HtFLlib's two parts."""
        nn.Module.__init__(model)
        hidden = (self.case.common,) if more.get("is_global") else HIDDEN[client % len(HIDDEN)]
        widths = (FEATURES, *hidden)
        layers: list[nn.Module] = [nn.Flatten()]
        for width, next_width in zip(widths, hidden, strict=False):
            layers += [nn.Linear(width, next_width), nn.ReLU()]
        features = hidden[0] if more.get("is_global") else WIDTH
        model.base = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(features))
        model.head = nn.Linear(features, CLASSES)

    def begin(self, server: Any) -> None:
        """Put tensors of fedpfl into those files that there are."""
        folder = server.save_folder_name
        for (role, item), (_, values) in self.begun.items():
            module = self.files.load_item(role, item, folder)
            if module is not None:
                leaves = tree.leaves(values)
                for parameter, value in zip(module.parameters(), leaves, strict=True):
                    parameter.data = value.clone()
                self.files.save_item(module, role, item, folder)

    def look(self, server: Any) -> None:
        """Keep the networks in the files before each round."""
        models: Models = {}
        for (role, item), (owner, names) in self.modules.items():
            parameters = self.files.load_item(role, item, server.save_folder_name).parameters()
            models.update(name_entries(owner, dict(zip(names, parameters, strict=True))))
        self.taken[self.round - 1] = models


def compare(case: Case) -> Comparison:
    """Return the comparison of a case."""

    def play(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
        if case.common:
            sizes = (48,) * CLIENTS
            problem = Problem(problem.folder, problem.engine, train_sizes=sizes)
        with keep_beginning(METHODS[case.method]) as beginning:
            ours = play_ours(case, problem)
        library = Library(folder, problem, case, beginning)
        options: dict[str, Any] = {"feature_dim": WIDTH}
        if case.common:
            options["global_model"] = "one"
        return ours, library.play(
            case.server.split(".")[1],
            rounds=ROUNDS,
            prepare=library.begin,
            **options,
            **case.options,
        )

    return Comparison(case.method, REPOSITORY, "three kinds", case.undone, play)


def list_comparisons() -> list[Comparison]:
    """Return what is compared with HtFLlib; nowhere are last minibatches dropped."""
    return [compare(case) for case in CASES]
