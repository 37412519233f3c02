"""Empty cells: what fills them is scikit-learn's over the joined training rows, wherever they are."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import StandardScaler

import fedpfl
from fedpfl.data.datasets import memory
from fedpfl.engine.training.jobs import _sample_key
from fedpfl.runner.export import write_models
from tests.data.promises import build, one_line

SMALL = ("model=mlp", "model.hidden=[8]", "clients=5", "participation=1", "rounds=1")
TABLE = ("dataset=memory", "partition=groups", "dataset.label=sick", "dataset.categories=[ward]")
RULES = {"mean": "mean", "median": "median", "mode": "most_frequent", "indicator": "mean"}


def make_sites() -> dict[str, pd.DataFrame]:
    """Five tables with empty cells; the last has no ward and no blood pressure at all."""
    rng = np.random.default_rng(0)
    sites = {}
    for number in range(5):
        age, dose = rng.integers(1, 9, 40 + number), rng.normal(number, 2, 40 + number)
        frame = pd.DataFrame({"age": age.astype(float), "dose": dose, "pressure": dose * 90})
        for column in frame:
            frame.loc[rng.random(len(frame)) < 0.3, column] = np.nan
        frame["full"] = rng.normal(size=len(frame))
        frame["ward"] = rng.choice(["a", "b", "c", None], len(frame))
        sites[f"site{number}"] = frame.assign(sick=age > 4)
    sites["site4"][["pressure", "ward"]] = np.nan
    return sites


@pytest.mark.parametrize("rule", RULES)
def test_empty_cells_are_filled_as_by_scikit_learn(rule):
    held = memory.hold_data(make_sites())
    words = (f"dataset.digest={held.digest}", f"dataset.missing={rule}", "unseen_groups=[site1]")
    run = build(*TABLE, *SMALL, *words)
    federation = run.federation
    rows = pd.concat([*make_sites().values()], ignore_index=True)
    # An empty category has none of its values, as pandas has it.
    encoded = pd.get_dummies(rows.drop(columns="sick"), columns=["ward"], prefix_sep="=")
    encoded = encoded.astype(float)
    known = torch.cat(federation.train).numpy()
    imputer = SimpleImputer(strategy=RULES[rule], add_indicator=rule == "indicator")
    imputer.set_output(transform="pandas").fit(encoded.iloc[known])
    expected = imputer.transform(encoded)
    scaler = StandardScaler().fit(encoded.iloc[known])
    expected[encoded.columns] = (expected[encoded.columns] - scaler.mean_) / scaler.scale_
    told = {f"missingindicator_{name}": f"{name} is missing" for name in encoded}
    expected = expected.rename(columns=told)
    found = pd.DataFrame(federation.normalize(federation.x), columns=federation.feature_names)
    for name in {*told.values()} & {*expected}:
        expected[name] = (
            StandardScaler().fit(expected[[name]].iloc[known]).transform(expected[[name]])
        )
    assert {*found} == {*expected}
    np.testing.assert_allclose(found[[*expected]], expected, rtol=1e-4, atol=1e-5)


def test_models_that_are_taken_home_fill_by_the_same_numbers(tmp_path):
    sites = make_sites()
    words = (*SMALL, "method=fedavg", "dataset.label=sick", "dataset.categories=[ward]")
    options = {"directory": tmp_path / "run", "progress": False}
    trained = fedpfl.run(*words, "dataset.missing=indicator", data=sites, **options)
    frame = pd.get_dummies(sites["site0"], columns=["ward"], prefix_sep="=")
    logits = trained.predict("site0", frame)
    assert logits.isfinite().all()
    write_models(trained, tmp_path / "models", "torchscript", clients=["site0"])
    names = trained.summary["input"]["features"]
    rows = frame.assign(**{f"{name} is missing": frame[name].isna() for name in frame})[names]
    module = torch.jit.load(tmp_path / "models" / "site0.pt")
    assert torch.allclose(module(torch.tensor(rows.to_numpy(np.float32))), logits, atol=1e-5)
    assert "filled in: indicator; `dose is missing`" in (tmp_path / "models/README.md").read_text()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["input"]["fill"] == summary["input"]["mean"]
    assert trained.config["dataset"]["missing"] == "indicator"


def test_a_column_in_another_unit_is_told_before_training():
    """Met by hospitals: mg/l beside mg/dl; a site's own ward or older patients are no unit."""
    sites = {name: frame.assign(dose=frame["dose"] + 100) for name, frame in make_sites().items()}
    for name, frame in sites.items():
        frame["smokes"] = (np.arange(len(frame)) < 3) != (name == "site0")
    sites["site4"]["dose"] = np.nan
    held = memory.hold_data(sites)
    words = (*TABLE, *SMALL, "dataset.missing=mean")
    assert build(*words, f"dataset.digest={held.digest}").notes == ()
    sites["site1"]["dose"] *= 2
    held = memory.hold_data(sites)
    assert build(*words, f"dataset.digest={held.digest}").notes == ()
    sites["site1"]["dose"] /= 2
    sites["site2"]["dose"] *= 10
    held = memory.hold_data(sites)
    (note,) = build(*words, f"dataset.digest={held.digest}").notes
    assert note.startswith(
        "units: column 'dose' has mean 1025 at site2, and 100.1 to 103.4 elsewhere"
    )
    private = ("method=fedavg", "privacy=client", "privacy.noise=1")
    assert build(*words, f"dataset.digest={held.digest}", *private).notes == ()


@pytest.mark.parametrize(
    ("change", "words", "text"),
    [
        (
            {},
            (),
            "column 'age' has no value in row 2; fill it in, or leave the row out, or set dataset.mi",
        ),
        ({"sick": None}, ("dataset.missing=mean",), "label has no value in row 1"),
        ({"dose": np.inf}, ("dataset.missing=mean",), "'dose': a number in row 1 is not finite"),
        ({"ward": " "}, ("dataset.missing=mean",), "ward has no value in row 1"),
        ({"age": np.nan}, ("dataset.missing=mode",), "feature age has no value in any training"),
    ],
)
def test_what_cannot_be_filled_is_one_line(change, words, text):
    frame = make_sites()["site0"].assign(**change)
    held = memory.hold_data(dict.fromkeys("abcde", frame))
    assert text in one_line(lambda: build(*TABLE, *SMALL, f"dataset.digest={held.digest}", *words))


def test_runs_that_fill_by_other_numbers_are_no_one_program():
    """In lockstep, of two seeds with given mean and std."""
    held = memory.hold_data(make_sites())
    federation = build(
        *TABLE, *SMALL, f"dataset.digest={held.digest}", "dataset.missing=mode"
    ).federation
    keys = [
        _sample_key([SimpleNamespace(federation=one)])
        for one in (federation, replace(federation, fill=(0.0,)))
    ]
    assert keys[0] != keys[1]
