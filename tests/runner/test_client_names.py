"""Clients that are somebody: their names stand wherever a result says whose it is."""

import csv
import json

import numpy as np
import pytest

import fedpfl
from fedpfl.data.partition.file import file
from fedpfl.report.__main__ import main
from tests.command import TINY_TASK

NAMES = sorted(['Klinik Süd, "Nord"', "<b>hospital", "hospital 07", "zürich"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of FedPer over four sites of two classes, the last of which never takes part."""
    folder = tmp_path_factory.mktemp("named")
    (folder / "sites").mkdir()
    rng = np.random.default_rng(0)
    for name in NAMES:
        labels = np.array(["ill", "well"])[rng.integers(0, 2, 24)]
        features = rng.normal(size=(24, 5)) + (labels == "ill")[:, None]
        rows = [["a", "b", "c", "d", "e", "state"]]
        rows += [[*map(str, values), label] for values, label in zip(features, labels, strict=True)]
        text = "".join(",".join(row) + "\n" for row in rows)
        (folder / "sites" / f"{name}.csv").write_text(text)
    words = "model=mlp dataset=sites dataset.label=state eval.common=true method=fedselect"
    place = f"dataset.path='{folder / 'sites'}'"
    about = {"directory": folder / "run", "progress": False, "unseen": 0.25, "clients": 4}
    return fedpfl.run(*TINY_TASK, *words.split(), place, **about)


def test_files_have_names_beside_numbers(trained):
    newcomer = {int(row) for row in trained.clients["client"][trained.clients["unseen"] == 1]}
    participants = [name for number, name in enumerate(NAMES) if number not in newcomer]
    for name, expected in (("clients.csv", NAMES), ("common.csv", participants)):
        with (trained.path / name).open(encoding="utf-8", newline="") as table:
            rows = list(csv.DictReader(table))
        assert [row["name"] for row in rows] == expected
        assert [NAMES[int(row["client"])] for row in rows] == expected
    masks = json.loads((trained.path / "masks.json").read_text())
    assert masks["names"] == [NAMES[number] for number in masks["clients"]]
    with np.load(trained.path / "partition.npz") as arrays:
        assert arrays["client_names"].tolist() == NAMES
    assert trained.summary["classes"] == ["ill", "well"] == list(trained.classes)


def test_python_takes_a_name_for_a_number(trained):
    x, y = trained.samples("zürich")
    assert (trained.predict("zürich", x) == trained.predict(NAMES.index("zürich"), x)).all()
    accuracy = 100 * (trained.predict("zürich", x).argmax(1) == y).double().mean()
    assert trained.clients.loc["zürich", "accuracy"] == pytest.approx(float(accuracy))
    assert trained.personal("hospital 07").keys() == trained.personal(2).keys()
    with pytest.raises(fedpfl.FedpflError, match=r"client: one of .*got 'hospital 7'.*hospital 07"):
        trained.personal("hospital 7")


def test_a_page_shows_names_as_text(trained, tmp_path):
    main(["html", str(trained.path), "--out", str(tmp_path)])
    (page,) = tmp_path.glob("*.html")
    text = page.read_text(encoding="utf-8")
    assert "hospital 07" in text
    assert json.dumps("zürich")[1:-1] in text
    assert "<b>hospital" not in text


def test_names_come_back_with_a_partition_file(trained, tmp_path):
    y = np.zeros(96, int)
    assert file(y, 4, 0, path=trained.path / "partition.npz").client_names == tuple(NAMES)
    path = tmp_path / "partition.json"
    path.write_text(json.dumps({"b": [0, 1], "a": [2, 3]}))
    assert file(y, 2, 0, path=path).client_names == ("b", "a")
    path.write_text(json.dumps({"1": [0, 1], "0": [2, 3]}))
    assert file(y, 2, 0, path=path).client_names == ()
