"""Nodes that have a site each, and a server without data: as dataset=sites in one place, bit for bit;
what is told of a site, and what of it is believed.
"""

import contextlib
import itertools
import json
import re
import shutil
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import fedpfl
from fedpfl import federate
from fedpfl.config.plan import check_config
from fedpfl.config.run import build_run
from fedpfl.data.datasets.shared.sums import FLOAT_BITS, sum_channels
from fedpfl.ground.errors import FedpflError
from fedpfl.privacy import Secret
from fedpfl.remote import agreement as agreements
from fedpfl.remote import app, wire
from fedpfl.remote.agreement import SiteFacts, SiteSums
from fedpfl.remote.budget import make_plan_key
from fedpfl.remote.messages import read_message
from fedpfl.remote.node import PLAIN_POLICY, NodePolicy
from fedpfl.remote.server import InProcessGrid
from fedpfl.remote.sites import SiteNode
from tests.command import read_table
from tests.conftest import assert_same, keep_quick
from tests.data.promises import one_line
from tests.data.test_sites import write_images
from tests.privacy.conftest import reckon_by_few_orders
from tests.remote.grids import Overheard
from tests.remote.test_remote import Faulty
from tests.remote.test_trust import change_about

NAMES = ("berlin", "aachen", "chur", "davos")
WORDS = [
    *("dataset=sites", "clients=4", "model=mlp", "rounds=2", "participation=0.5"),
    *("local.epochs=1", "local.batch_size=8", "eval.every=1", "validation=0.2"),
    *("eval.finetune_epochs=1", "eval.finetune_every=1", "federate.timeout=0.01"),
]
PLAIN = ["method=fedavg", *WORDS]
SHORT = [word for word in PLAIN if not word.startswith(("rounds", "eval.finetune"))] + ["rounds=1"]


# ---- Sites of every form


def draw_values(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return samples and labels of a site; the first one lacks a label."""
    rng = np.random.default_rng(number)
    count = 20 + 9 * number
    labels = rng.integers(0, 3 if number else 2, count)
    values = rng.normal(size=(count, 5)) * [1, 10, 0.1, 1, 1] + labels[:, None] + 10 * number
    return values.astype(np.float32), labels


def write_arrays(folder: Path, change_samples=lambda x: x) -> None:
    for number, name in enumerate(NAMES):
        x, y = draw_values(number)
        np.savez(folder / f"{name}.npz", x=change_samples(x), y=y)


def write_tokens(folder: Path) -> None:
    write_arrays(folder, lambda x: np.abs(x).astype(np.int64))


def write_pixels(folder: Path) -> None:
    """Write images whose labels are texts, with test parts of their own."""
    write_arrays(folder, lambda x: (x[:, None, None] * 7).astype(np.uint8).repeat(5, 2))
    for number, name in enumerate(NAMES):
        labels = np.array(["emu", "cat", "dog"])[draw_values(number)[1]]
        rewrite(folder / f"{name}.npz", y=labels, test_from=11 + number)


def rewrite(path: Path, **arrays) -> None:
    """Give an archive other arrays."""
    with np.load(path) as archive:
        content = {**archive, **arrays}
    np.savez(path, **content)


def write_tables(folder: Path) -> None:
    """Write tables whose columns come in another order, with other categories."""
    for number, name in enumerate(NAMES):
        x, y = draw_values(number)
        columns = dict(zip(["age", "dose", "height"], x.T[:3], strict=True))
        columns["ward"] = np.array(["x", "y", "z", "w"])[np.arange(len(y)) % (2 + number % 3)]
        columns["sick"] = np.array(["no", "yes", "maybe"])[y]
        names = sorted(columns, reverse=bool(number % 2))
        pd.DataFrame(columns)[names].to_csv(folder / f"{name}.csv", index=False)


def write_empty_cells(folder: Path) -> None:
    """Write tables with empty cells, of other columns at each site."""
    write_tables(folder)
    for number, file in enumerate(sorted(folder.iterdir())):
        table = pd.read_csv(file)
        table.loc[::3, ["age", "dose", "ward"][number % 3]] = np.nan
        table["height"] = (table["height"] + 20) * (10 if number == 1 else 1)
        table.to_csv(file, index=False)


def write_several_labels(folder: Path) -> None:
    """Write tables with two columns of labels, one that a site always has."""
    for number, name in enumerate(NAMES):
        x, y = draw_values(number)
        table = pd.DataFrame(x, columns=[*"abcde"])
        table.assign(flu=y > 0, asthma=(y < 2) | (number == 1)).to_csv(
            folder / f"{name}.csv", index=False
        )


def write_numbers(folder: Path) -> None:
    write_arrays(folder)
    for path in folder.iterdir():
        with np.load(path) as arrays:
            rewrite(path, y=arrays["y"] + arrays["x"][:, 0])


def write_folders(folder: Path) -> None:
    for number, name in enumerate(NAMES):
        write_images(folder / name, ("cat", "dog", "emu")[: 2 + number % 2], count=6 + number)


TABLE = ["dataset.label=sick", "dataset.categories=[ward]"]
FORMS = {
    "empty cells": (write_empty_cells, [*TABLE, "dataset.missing=indicator"]),
    "several labels": (
        write_several_labels,
        ["task=multilabel", "dataset.label=[flu,asthma]"],
    ),
    "numbers": (write_numbers, ["task=regression", "stopping.early=true", "rounds=2"]),
    "pixels with test parts": (write_pixels, ["partition.test_fraction=null"]),
    "measures": (write_arrays, ["metrics=[precision,balanced,auroc,ece]"]),
    "tables": (write_tables, TABLE),
    "arrays": (write_arrays, []),
    "tokens": (write_tokens, ["model=text"]),
    "folders": (write_folders, ["dataset.size=8"]),
    "own classes": (write_arrays, ["eval.classes=own"]),
}


@pytest.fixture(autouse=True)
def sites(tmp_path):
    (tmp_path / "sites").mkdir()


def make_nodes(words: list[str], policy: NodePolicy = PLAIN_POLICY) -> dict:
    """Return nodes in memory, in another order than that of their names."""
    plan = check_config(app.compose_federation(words)[1])
    entries = sorted(Path("sites").absolute().iterdir(), key=lambda entry: entry.name[::-1])
    return {
        number: SiteNode(plan, entry, "", Path(f"states/{number}"), policy)
        for number, entry in enumerate(entries)
    }


def assert_as_in_one_place(path: Path, words: list[str]) -> None:
    """Compare all columns of all rounds and clients with those of the same run in one place."""
    own = {word.partition("=")[0]: word for word in words}  # of a key given twice the last one
    kept = [word for key, word in own.items() if key != "clients" and "federate" not in key]
    fedpfl.run(*kept, "dataset.path=sites", "engine=loop", directory="alone", progress=False)
    for name in ("rounds.csv", "clients.csv"):
        tables = [read_table(folder / name) for folder in (path, Path("alone"))]
        for row in itertools.chain(*tables):
            for column in [column for column in row if column.startswith("label_")]:
                del row[column]  # what labels a site has stays there
        assert tables[0] == tables[1]
    with np.load(path / "partition.npz") as there, np.load("alone/partition.npz") as alone:
        for name in ("train_indices", "test_indices", "train_offsets", "client_names"):
            assert np.array_equal(there[name], alone[name])


@pytest.mark.parametrize("form", keep_quick(FORMS, 4))
def test_sites_of_every_form_as_in_one_place(form, here, capsys):
    write, options = FORMS[form]
    write(here / "sites")
    words = [*PLAIN, "rounds=1", *options]
    assert_as_in_one_place(app.run_server(InProcessGrid(make_nodes(words)), words), words)
    has_units = "units: column 'height' has mean 2" in capsys.readouterr().err
    assert has_units == (form == "empty cells")
    alone = fedpfl.load("alone")
    for client in range(4):
        for stem in ("personal", "finetuned"):
            (kept,) = here.glob(f"states/*/*/client{client}/{stem}.safetensors")
            assert_same(load_file(kept), alone.personal(client, stem == "finetuned"))


# ---- What travels


@pytest.fixture(scope="module")
def overheard(tmp_path_factory):
    """Return the grid of a federation that was played, and its run directory."""
    folder = tmp_path_factory.mktemp("overheard")
    (folder / "sites").mkdir()
    write_arrays(folder / "sites")
    with contextlib.chdir(folder):
        grid = Overheard(make_nodes(SHORT))
        path = app.run_server(grid, SHORT)
    return grid, folder / path


def test_nothing_is_told_but_what_docs_list(overheard):
    grid, path = overheard
    told = [wire.unpack_message(reply) for reply in grid.replies]
    about_sites = [fields for fields, trees in told if not trees and "clients" not in fields]
    assert len(about_sites) == 8
    for fields in about_sites[:4]:
        assert fields.keys() == {"key", "site"}
        assert fields["site"].keys() == {"name", "samples", "test_from", "form"}
        assert fields["site"]["form"].keys() == {"dtype", "shape", "labels", "columns"}
    for fields in about_sites[4:]:
        assert fields.keys() == {"key", "sums"}
        assert [len(channel) for channel in fields["sums"]] == [3] * 5
    assert "learnt of each site its name" in (path / "run.log").read_text()
    agreed = json.loads((path / "sites.json").read_text())["agreement"]
    assert [site["name"] for site in agreed["sites"]] == sorted(NAMES)


def test_sums_are_exact_whoever_adds_them():
    rng = np.random.default_rng(0)
    values = (rng.normal(size=300) * 10.0 ** rng.integers(-44, 38, 300)).astype(np.float32)
    x = torch.from_numpy(values)[:, None]
    (found,) = sum_channels(x, torch.arange(300))
    exact = [Fraction(float(value)) for value in values]
    assert Fraction(found.values, 2**FLOAT_BITS) == sum(exact)
    assert Fraction(found.squares, 4**FLOAT_BITS) == sum(value**2 for value in exact)
    parts = [sum_channels(x, part)[0] for part in torch.randperm(300).split(77)]
    total = parts[0]
    for part in parts[1:]:
        total = total.add_sums(part)
    assert total == found


# ---- Sites that differ are named at once


def rename_column(path: Path) -> None:
    pd.read_csv(path).rename(columns={"age": "years"}).to_csv(path, index=False)


DIFFERENCES = {
    "texts": ({"y": np.array(["a", "b"] * 19)}, "labels are texts, and those of"),
    "test part": ({"test_from": 9}, "chur.npz has a test part of its own; set part"),
    "columns": (rename_column, "chur.* differ in columns age, years"),
}
"""Other arrays of site chur, or what is done to its table | what is said."""


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_a_site_that_differs_is_named_at_once(kind, here):
    change, reason = DIFFERENCES[kind]
    write, options = FORMS["tables" if callable(change) else "arrays"]
    write(here / "sites")
    (path,) = here.glob("sites/chur.*")
    change(path) if callable(change) else rewrite(path, **change)
    words = [*PLAIN, *options]
    with pytest.raises(FedpflError, match=reason) as refused:
        app.run_server(InProcessGrid(make_nodes(words)), words)
    assert "\n" not in str(refused.value)
    assert not [*here.rglob("rounds.csv")]


def test_as_many_sites_as_clients_must_come(here):
    write_arrays(here / "sites")
    nodes, three = make_nodes(PLAIN), [*PLAIN, "clients=3"]
    with pytest.raises(
        FedpflError, match=r"4 sites came .*\(aachen, berlin, chur, .* clients=3; .* set clients=4"
    ):
        app.run_server(InProcessGrid(make_nodes(three)), three)
    twice = InProcessGrid({**nodes, 3: nodes[2]})
    with pytest.raises(FedpflError, match="two nodes call their site"):
        app.run_server(twice, PLAIN)
    with pytest.raises(FedpflError, match="clients must say how many there are"):
        app.compose_federation(["method=fedavg", "dataset=sites"])


@reckon_by_few_orders()
def test_sums_of_a_site_would_leave_it_without_noise(here, monkeypatch):
    """Neither the server asks for them, nor does a node answer; with set constants none are asked."""
    pytest.importorskip("dp_accounting", reason="needs the extra [privacy]")
    write_arrays(here / "sites")
    words = [word for word in SHORT if "validation" not in word]
    words += ["validation=0", "privacy=sample", "privacy.noise=2", "privacy.seed=1"]
    nodes = make_nodes(words)
    with pytest.raises(FedpflError, match=r"privacy=sample: sums .* set dataset.mean and dataset"):
        app.run_server(InProcessGrid(nodes), words)
    plan = nodes[0]._plan
    agreement = agreements.agree_on_sites([node._facts for node in nodes.values()])
    request = {
        "key": make_plan_key(plan),
        "wants": "sums",
        "agreement": agreement.model_dump(),
    }
    fields, _ = wire.unpack_message(nodes[0].answer_message(wire.pack_message(request, {})))
    assert "would leave it without noise" in fields["fault"]
    # The secret is bound to the configuration, which in one place names a folder.
    for module in ("runner.resume", "remote.budget"):
        monkeypatch.setattr(f"fedpfl.{module}.make_secret", lambda run, key: Secret.of_seed(1))
    words += ["dataset.mean=[0.,1,2,3,4]", "dataset.std=[1.,9,1,1,1]"]
    assert_as_in_one_place(app.run_server(InProcessGrid(make_nodes(words)), words), words)


# ---- What hostile nodes and servers tell


def honest_facts() -> dict:
    form = {"dtype": "float32", "shape": [5], "labels": ["0", "1"], "columns": None}
    return {"name": "chur", "samples": 38, "test_from": None, "form": form}


def change_form(**fields):
    facts = honest_facts()
    return {**facts, "form": {**facts["form"], **fields}}


HOSTILE_FACTS = {
    "vast samples": {**honest_facts(), "samples": 10**18},
    "a name of two lines": {**honest_facts(), "name": "chur\nround 1/3"},
    "a million classes": change_form(labels=[*map(str, range(10**6))]),
    "a vast shape": change_form(shape=[10**6, 10**6]),
    "another type": change_form(dtype="object"),
    "columns twice": change_form(columns=[["age", "age"], {}, []]),
    "empty cells elsewhere": change_form(columns=[["age"], {}, ["ward"]]),
}


HOSTILE_SUMS = {
    "nan": [[float("nan"), 1, 2]],
    "another number of channels": [[1, 1, 2], [1, 1, 2]],
    "squares that are too small": [[10 * 2**FLOAT_BITS, 1, 2]],
}


def read_sums(sums, is_image: bool = False):
    return read_message(SiteSums, {"key": {}, "sums": sums}).check(1, range(2, 3), is_image)


def test_what_no_site_can_tell_is_refused_in_one_line():
    assert read_message(SiteFacts, change_form(columns=[["age"], {}, ["age"]])).name == "chur"
    (honest,) = sum_channels(torch.tensor([[2.0], [3.0]]), torch.arange(2))
    assert read_sums([[*honest]]) == [honest]
    lies = [
        (partial(read_message, SiteFacts, facts), name) for name, facts in HOSTILE_FACTS.items()
    ]
    lies += [(partial(read_sums, sums), name) for name, sums in HOSTILE_SUMS.items()]
    lies += [(partial(read_sums, [[511, 2 * 255**2, 2]], is_image=True), "a pixel of 256")]
    for read_lie, name in lies:
        assert len(one_line(read_lie)) < 400, name


def test_a_node_that_lies_is_named(here, capsys):
    """A description leaves the node out, for which another may come; sums end the beginning."""
    write_arrays(here / "sites")
    nodes = make_nodes(SHORT)
    lie = change_about(site={**honest_facts(), "samples": -1})
    app.run_server(Faulty(InProcessGrid({**nodes, 9: nodes[3]}), 9, lie), SHORT)
    assert (
        "node 9 is left out: a message that is no sitereply: site.samples: Input should be"
        in capsys.readouterr().err
    )
    words = [*SHORT, "seed=1"]

    def lie(answer):
        is_about_sums = "sums" in wire.unpack_message(answer)[0]
        return change_about(sums=[[0, 0, 0]] * 5)(answer) if is_about_sums else answer

    with pytest.raises(FedpflError, match=r"davos \(node 3\): sums that 0 values"):
        app.run_server(Faulty(InProcessGrid(make_nodes(words)), 3, lie), words)


def agree_sites(*names, samples=47):
    return {"sites": [{"name": name, "samples": samples, "test_from": None} for name in names]}


HOSTILE_AGREEMENTS = {
    "other sizes": (agree_sites("davos", samples=40), r"davos has 47 samples, .* and had 40"),
    "nan": ({"mean": [float("nan")] * 5}, "mean.0: Input should be a finite number"),
    "another form": (
        {"form": change_form(shape=[6], labels=["0", "1", "2"])["form"]},
        r"davos: samples are float32 \[5\], and davos: float32 \[6\]",
    ),
    "fewer labels": ({"form": honest_facts()["form"]}, "site davos has label '2'"),
}


@pytest.mark.parametrize("kind", HOSTILE_AGREEMENTS)
def test_a_node_refuses_what_it_has_not_agreed_on(kind, overheard):
    fields, reason = HOSTILE_AGREEMENTS[kind]
    grid, _ = overheard
    (node,) = (node for node in grid.node_by_id.values() if node._facts.name == "davos")
    request = next(message for message in grid.requests if b'"clients"' in message)
    assert "clients" in wire.unpack_message(node.answer_message(request))[0]
    about, trees = wire.unpack_message(request)
    about["agreement"].update(fields)
    answer, _ = wire.unpack_message(node.answer_message(wire.pack_message(about, trees)))
    assert re.search(reason, answer["fault"])
    for message in (b"", request[:50], wire.pack_message({"key": None}, {})):
        assert "fault" in wire.unpack_message(node.answer_message(message))[0]


# ---- Going on


def test_a_killed_server_goes_on_with_what_was_agreed(here, tmp_path_factory):
    """If that is undamaged; without a site that has changed meanwhile, which is named."""
    write_arrays(here / "sites")
    words = [*PLAIN, "participation=1"]
    with pytest.raises(KeyboardInterrupt):
        app.run_server(Overheard(make_nodes(words), left=20), words)
    changed = shutil.copytree(here, tmp_path_factory.mktemp("changed") / "copy")
    again = Overheard(make_nodes(words))
    path = app.run_server(again, words)
    asked = [wire.unpack_message(message)[0] for message in again.requests]
    assert not [fields for fields in asked if fields.get("wants") in ("site", "sums")]
    assert_as_in_one_place(path, words)
    (path / "sites.json").write_text("{")
    with pytest.raises(FedpflError, match=r"sites\.json is damaged; restart=true removes"):
        app.run_server(InProcessGrid(make_nodes(words)), words)

    with contextlib.chdir(changed):
        rewrite(Path("sites/chur.npz"), x=np.ones((39, 5), np.float32), y=np.arange(39) % 3)
        path = app.run_server(InProcessGrid(make_nodes(words)), words)
        assert "is left out: chur has 39 samples" in (path / "run.log").read_text()
        assert [row["participants"] for row in read_table(path / "rounds.csv")][-1] == "3"


# ---- The command


@pytest.mark.parametrize("form", keep_quick(FORMS, 1))
def test_each_site_of_a_folder_has_a_node(form, here):
    """`fedpfl federate` keeps the folder from the server, and says what it has found in it."""
    write, options = FORMS[form]
    write(here / "sites")
    words = [*PLAIN, *options, "rounds=1"]
    words = [word for word in words if not word.startswith(("clients=", "federate."))]
    run = build_run(check_config(app.compose_federation([*words, "dataset.path=sites"])[1]))
    server_words = federate.plan_server([*words, "dataset.path=sites"], run)
    assert not [word for word in server_words if "path" in word]
    assert "clients=4" in server_words
    assert federate.main([*words, "dataset.path=sites"]) == 0
    (path,) = (rounds.parent for rounds in here.glob("outputs/federated/**/rounds.csv"))
    assert_as_in_one_place(path, words)
