"""Exported models stand alone: on samples as the data set holds them they answer as the run does."""

import itertools
import json
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import fedpfl
from fedpfl import export
from fedpfl.ground.errors import FedpflError
from fedpfl.runner import card as card_facts
from tests.command import TINY, TINY_TASK, call_main
from tests.conftest import assert_same, keep_only, read_cases
from tests.runner.test_client_names import NAMES, trained  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def digits_runs(tmp_path_factory):
    """Tiny runs on digits by method."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {}

    def play(method, *words):
        if method not in runs:
            words = (*TINY, f"method={method}", *words)
            runs[method] = fedpfl.run(*words, directory=folder / method, progress=False)
        return runs[method]

    return play


METHODS = (
    *("fedper", "ditto", "apfl", "fedcp", "feddbe", "fedproto", "fedrod", "gpfl", "heterofl"),
    *("knn_per", "fedbabu", "per_fedavg"),
)
"""Of all kinds of personal models; those from apfl to knn_per predict by a rule of their own."""
NETWORKS = {
    "plain": "model=mlp model.hidden=[8]",
    "statistics": "model=fedspu_emnist",
    "attention": "model=vit model.patch=7 model.layers=1 model.heads=2 model.width=16",
    "lora": "model=mlp model.hidden=[16] adapter=lora adapter.layers=[linear] adapter.rank=2",
}
CASES = [
    f"{method} {network}"
    for method, network in itertools.product(METHODS, NETWORKS)
    if method != "heterofl" or network in ("plain", "statistics")  # others have no sub-models
]
QUICK = [
    *("fedper statistics", "knn_per lora", "apfl attention", "fedbabu lora", "heterofl plain"),
    "ditto statistics",
]


@pytest.mark.parametrize("case", keep_only(CASES, QUICK))
def test_models_answer_as_the_evaluation_also_fine_tuned(case, tmp_path):
    """To the last bit in Python; as files they answer alike."""
    method, network = case.split()
    words = [*TINY_TASK, "rounds=1", *NETWORKS[network].split(), f"method={method}"]
    tuning = ["eval.finetune_epochs=1", "eval.finetune_every=1", "local.batch_size=8"]
    run = fedpfl.run(*words, *tuning, directory=tmp_path / "run", progress=False)
    for prefix, options in (("", []), ("ft_", ["--finetuned"])):
        out = tmp_path / f"models{prefix}"
        assert export.main([str(run.path), str(out), "--format=torchscript", *options]) == 0
        samples, loss = 0, 0.0
        for client in range(4):
            x, y = run.samples(client)
            logits = run.predict(client, x, finetuned=bool(options))
            answer = torch.jit.load(out / f"client{client}.pt")(x)
            torch.testing.assert_close(answer, logits, rtol=1e-4, atol=1e-4)
            correct = 100 * int((logits.argmax(1) == y).sum()) / len(y)
            assert correct == run.clients[f"{prefix}accuracy"][client]
            loss += float(F.cross_entropy(logits, y, reduction="sum"))
            samples += len(y)
        assert loss / samples == run.rounds[f"{prefix}loss"].iloc[-1]
        entries = tmp_path / f"entries{prefix}"
        assert export.main([str(run.path), str(entries), "--clients=1", *options]) == 0
        kept = torch.load(entries / "client1.pt", weights_only=True)
        assert_same(kept, run.personal(1, finetuned=bool(options)))
        card = (out / "README.md").read_text("utf-8")
        assert f"after round 1, {'after' if options else 'before'} fine-tuning" in card
        (result,) = yaml.safe_load(card.split("---\n")[1])["model-index"][0]["results"]
        mean = run.clients[f"{prefix}accuracy"].mean()
        assert result["metrics"][0]["value"] == pytest.approx(mean)


def test_a_file_with_other_logits_is_refused(digits_runs, tmp_path, capsys, monkeypatch):
    """Also one with the same classes: here the logits are off by a constant."""
    trace = torch.jit.trace
    monkeypatch.setattr(
        torch.jit,
        "trace",
        lambda module, *given, **named: trace(
            nn.Sequential(module, nn.LogSoftmax(1)), *given, **named
        ),
    )
    run = digits_runs("fedper")
    assert export.main([str(run.path), str(tmp_path / "out"), "--format", "torchscript"]) == 2
    assert "it does not answer as the run does" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_program_takes_any_number_of_samples(digits_runs, tmp_path):
    """The form in which ONNX files have it: what is read of two samples holds for all."""
    run, out = digits_runs("knn_per"), tmp_path / "models"
    assert export.main([str(run.path), str(out), "--format=pt2", "--clients=0"]) == 0
    x, _ = run.samples(0)
    answer = torch.export.load(out / "client0.pt2").module()(x)
    torch.testing.assert_close(answer, run.predict(0, x), rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("method", ["fedper", "knn_per"])
def test_an_onnx_file_answers_as_the_run(method, digits_runs, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run = digits_runs(method)
    out = tmp_path / "models"
    assert export.main([str(run.path), str(out), "--format", "onnx", "--clients", "2"]) == 0
    assert {path.name for path in out.iterdir()} == {"client2.onnx", "README.md", "config.yaml"}
    x, _ = run.samples(2)
    (logits,) = onnxruntime.InferenceSession(out / "client2.onnx").run(["logits"], {"x": x.numpy()})
    torch.testing.assert_close(torch.tensor(logits), run.predict(2, x), rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_mlflow_loads_a_model_with_its_signature(digits_runs, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("onnxruntime")
    run, out = digits_runs("fedper"), tmp_path / "models"
    assert export.main([str(run.path), str(out), "--format=mlflow", "--clients=2"]) == 0
    x, _ = run.samples(2)
    model = mlflow.pyfunc.load_model(out / "client2")
    logits = torch.tensor(model.predict(x.numpy())["logits"])
    torch.testing.assert_close(logits, run.predict(2, x), rtol=1e-4, atol=1e-4)
    (given,) = model.metadata.signature.inputs.to_dict()
    assert given["tensor-spec"] == {"dtype": "uint8", "shape": (-1, 1, 28, 28)}


def test_a_safetensors_file_says_what_its_input_is(digits_runs, tmp_path):
    run = digits_runs("fedper")
    out = tmp_path / "models"
    assert export.main([str(run.path), str(out), "--format=safetensors"]) == 0
    network = run.network()
    network.load_state_dict(load_file(out / "client1.safetensors"))
    x, _ = run.samples(1)
    with torch.no_grad():
        torch.testing.assert_close(network(x), run.predict(1, x))
    with safe_open(out / "client1.safetensors", "pt") as file:
        facts = json.loads(file.metadata()["input"])
    assert facts == run.summary["input"]
    assert (facts["kind"], facts["shape"], len(facts["mean"])) == ("images", [1, 28, 28], 1)


@pytest.mark.full
def test_features_come_as_they_were_measured(trained, tmp_path):  # noqa: F811
    """The constants of a computed normalisation are in the file, and the names of features."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    out = tmp_path / "models"
    words = [str(trained.path), str(out), "--format", "onnx", "--clients", "zürich"]
    assert export.main(words) == 0
    x, _ = trained.samples("zürich")
    expected = trained.predict("zürich", x)
    session = onnxruntime.InferenceSession(out / "zürich.onnx")
    (logits,) = session.run(["logits"], {"x": x.numpy()})
    torch.testing.assert_close(torch.tensor(logits), expected, rtol=1e-4, atol=1e-4)
    names = session.get_modelmeta().custom_metadata_map
    assert json.loads(names["features"]) == [*"abcde"]
    assert json.loads(names["classes"]) == ["ill", "well"]
    assert "- features: a, b, c, d, e, in this order" in (out / "README.md").read_text("utf-8")


def test_a_data_frame_has_its_columns_in_any_order(trained):  # noqa: F811
    x, _ = trained.samples("zürich")
    frame = pd.DataFrame(x.numpy(), columns=[*"abcde"])[[*"edcba"]].assign(more="text")
    assert torch.equal(trained.predict("zürich", frame), trained.predict("zürich", x))
    for other in (frame.drop(columns="c"), frame.assign(c="text")):
        with pytest.raises(FedpflError, match=r"samples cannot be read: .*; features are a, b, c,"):
            trained.predict("zürich", other)


def test_a_private_run_tunes_nothing_that_its_account_has_not(tmp_path):
    words = ["method=fedavg", *TINY, "privacy=sample", "privacy.noise=1", "eval.finetune_epochs=1"]
    for round in fedpfl.rounds(*words, "eval.finetune_every=2", directory=tmp_path / "run"):
        with pytest.raises(FedpflError, match="no model can be trained or fine-tuned"):
            round.personal(0, finetuned=True)


def test_some_clients_by_number_and_name(trained, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "new" / "models"
    assert export.main([str(trained.path), str(out), "--clients", "zürich,0"]) == 0
    assert capsys.readouterr().out == f"wrote 2 models to {out}\n"
    names = {"zürich.pt", "client0.pt", "README.md", "config.yaml"}
    assert {path.name for path in out.iterdir()} == names
    for name, client in (("zürich", "zürich"), ("client0", 0)):
        values = torch.load(out / f"{name}.pt", weights_only=True)
        assert_same(values, trained.personal(client))


def test_the_card_has_each_clients_accuracy_beside_fedavg(digits_runs, tmp_path):
    run = digits_runs("fedper")
    baseline = digits_runs("fedavg", "eval.finetune_epochs=1", "eval.finetune_every=1")
    out = tmp_path / "models"
    words = [str(run.path), str(out), "--baseline", str(baseline.path), "--license=mit"]
    assert export.main([*words, "--format=safetensors"]) == 0
    assert {f"{path.stat().st_mode & 0o777:o}" for path in out.iterdir()} == {"644"}
    card = (out / "README.md").read_text(encoding="utf-8")
    _, header, text = card.split("---\n", 2)
    facts = yaml.safe_load(header)
    expected = ("image-classification", "mit", ["digits"], ["accuracy"])
    assert (
        tuple(facts[key] for key in ["pipeline_tag", "license", "datasets", "metrics"]) == expected
    )
    assert card_facts.list_public_datasets({"name": "hf", "path": "ylecun/mnist"}) == [
        "ylecun/mnist"
    ]
    assert not card_facts.list_public_datasets({"name": "hf", "path": str(out)})
    for client in range(4):
        (row,) = re.findall(
            rf"^\| client{client}\.safetensors \| {client} \| .*$", text, re.MULTILINE
        )
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        ends = [run.clients[f"accuracy_{end}"][client] for end in ("low", "high")]
        assert cells[-2] == f"{ends[0]:.4g} to {ends[1]:.4g}"
        expected = run.clients["accuracy"][client], baseline.clients["ft_accuracy"][client]
        assert [float(cell) for cell in cells[-3::2]] == pytest.approx(expected, abs=0.005)
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert fedpfl.run(config, directory=run.path, progress=False)


UNEXPORTED = """
knn_per --format=safetensors => method=knn_per predicts by a rule of its own
fedper --clients=4 => client must be a whole number from 0 to 3, got 4
fedper --clients=berlin => client must be a whole number from 0 to 3
fedper --baseline={ditto} => is no run of FedAvg
fedper --format=tflite => invalid choice: 'tflite'
fedper --finetuned => fedper was not fine-tuned; run it with eval.finetune_epochs=5
"""


def test_what_cannot_be_exported_is_one_line(digits_runs, tmp_path):
    for words, line in read_cases(UNEXPORTED):
        method, option = words.split()
        option = option.format(ditto=digits_runs("ditto").path)
        run, out = digits_runs(method).path, tmp_path / "out"
        result = call_main(export.main, str(run), str(out), option)
        assert result.code == 2
        (notice,) = result.err.splitlines()
        assert line in notice
        assert not list(Path(tmp_path).iterdir())
