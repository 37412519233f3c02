"""Write a model card for exported models, as model hubs read it: data, training and accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml
from jinja2 import Environment

from fedpfl.config.messages import describe_choice
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.intervals import HIGH, LOW
from fedpfl.ground.records import Record, Values
from fedpfl.ground.tasks import CLASSIFICATION, NEXT_TOKEN, Task, configured_task
from fedpfl.report.names import DATASET_TITLES, METHOD_TITLES
from fedpfl.report.text import escape_markdown

if TYPE_CHECKING:
    from fedpfl.runner.library import Trained

TEMPLATE = Path(__file__).with_name("card.md")
PIPELINES = {
    "images": "image-classification",
    "token ids": "text-classification",
    "signals": "tabular-classification",
}
USES = {
    "pt": "`torch.load(FILE, weights_only=True)` is the result of `fedpfl.load(RUN).personal(CLIENT)`.",
    "safetensors": "`safetensors.torch.load_file(FILE)` is a `state_dict` of "
    "`fedpfl.load(RUN).network()`, which takes samples as below; without fedpfl, scale them first "
    "by `mean` and `std` (pixels are divided by 255 before), and put `fill` for NaN, as the file's "
    "metadata has them.",
    "peft": "`peft.PeftModel.from_pretrained(NETWORK, FILE)` adds it to the network that it was trained "
    "on.",
    "torchscript": "`torch.jit.load(FILE)(x)` are the logits, `[samples, classes]`.",
    "pt2": "`torch.export.load(FILE).module()(x)` are the logits, `[samples, classes]`.",
    "mlflow": "`mlflow.pyfunc.load_model(FILE).predict(x)` has the logits, `[samples, classes]`.",
    "onnx": '`onnxruntime.InferenceSession(FILE).run(["logits"], {"x": x})` are the logits, '
    "`[samples, classes]`.",
}
KINDS = {
    "images": "uint8 pixels, 0 to 255, not scaled",
    "token ids": "int32 token ids",
    "signals": "float32 values, not scaled",
}


def format_card(
    run: Trained,
    format_name: str,
    files: Mapping[int, str],
    baseline: Trained | None = None,
    finetuned: bool = False,
    license: str = "",
) -> str:
    """Return README.md for exported models.

    Args:
        run: with the models.
        format_name: of the files.
        files: the name of each client's file, by the client's number.
        baseline: a run of FedAvg over the same samples, to stand beside.
        finetuned: whether the files are the models after fine-tuning.
        license: of the models, "" where none is given.

    Raises:
        FedpflError: if the baseline has other samples or is no FedAvg, or a run was not fine-tuned.
    """
    # ---- Step 1: the table of clients, and the mean of the files' models.
    config = run.config
    method, dataset = config["method"]["name"], config["dataset"]["name"]
    task = configured_task(config)
    table = _make_table(run, files, baseline)
    column = f"ft_{task.score}" if finetuned else task.score
    if column not in run.clients:
        raise FedpflError(f"{run.path} was not fine-tuned; run it with eval.finetune_epochs=5")
    scores = _select_clients(run, files)[column]

    # ---- Step 2: the header that model hubs read, and the card.
    inputs = run.summary.get("input", {})
    title = f"{METHOD_TITLES.get(method, method)} on {DATASET_TITLES.get(dataset, dataset)}"
    score = {"type": task.score, "name": _head_score(task), "value": float(scores.mean())}
    header = _make_header(run, title, score, license)
    rounds = run.rounds
    jinja = Environment(trim_blocks=True, keep_trailing_newline=True)
    jinja.filters |= {"cell": _format_cell, "choice": describe_choice}
    return jinja.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        header=yaml.safe_dump(header, sort_keys=False),
        title=title,
        clients=len(run),
        rounds=run.round,
        evaluated_round=rounds["round"][rounds[task.score].notna()].max(),
        config=config,
        finetuned=finetuned,
        summary=run.summary,
        input_text=KINDS.get(inputs.get("kind"), "as the data set holds it"),
        output_text=_describe_outputs(run),
        use=USES[format_name],
        task=task,
        headings=[*table],
        rows=[*zip(*table.values(), strict=True)],
    )


def _make_table(
    run: Trained, files: Mapping[int, str], baseline: Trained | None
) -> dict[str, Sequence[Any] | pd.Series]:
    """Return the columns of the table of clients, by heading."""
    task = configured_task(run.config)
    unit = f", {task.unit}" if task.unit else ""
    clients = _select_clients(run, files)
    table = {
        "file": [*files.values()],
        "client": [run.client_names.get(number, number) for number in files],
        "trained on": clients["train"].astype(int),
        "tested on": clients["test"].astype(int),
        _head_score(task): clients[task.score],
    }
    if f"{task.score}{LOW}" in clients:
        ends = [clients[task.score + end].map(_format_cell) for end in (LOW, HIGH)]
        table["95 % interval"] = ends[0] + " to " + ends[1]
    if f"ft_{task.score}" in clients:
        table[f"after fine-tuning{unit}"] = clients[f"ft_{task.score}"]
    if baseline:
        table[f"FedAvg+FT{unit}"] = _read_baseline(run, baseline).loc[[*files]]
    return table


def _select_clients(run: Trained, files: Mapping[int, str]) -> pd.DataFrame:
    """Return the rows of clients.csv of the clients with files."""
    return run.clients.set_index(run.clients["client"].astype(int)).loc[[*files]]


def _head_score(task: Task) -> str:
    """Return the heading of a task's score."""
    return f"{task.score_word}, {task.unit}" if task.unit else task.score_word


def _make_header(run: Trained, title: str, score: Values, license: str) -> Record:
    """Return the entries of a card that model hubs read.

    Args:
        run: with the models.
        title: of the models.
        score: type, name and value of their mean score over clients.
        license: of the models, "" where none is given.
    """
    config = run.config
    task = configured_task(config)
    dataset = config["dataset"]["name"]
    kind = run.summary.get("input", {}).get("kind")
    pipeline = PIPELINES.get(kind, "other")
    if task.output:
        pipeline = "tabular-regression" if kind == "signals" else "other"
    result = {
        "task": {"type": pipeline},
        "dataset": {"type": dataset, "name": DATASET_TITLES.get(dataset, dataset)},
        "metrics": [dict(score)],
    }
    method = config["method"]["name"]
    header = {
        "library_name": "pytorch",
        "pipeline_tag": pipeline,
        "tags": ["federated-learning", "personalized-federated-learning", "fedpfl", method],
        "license": license,
        "datasets": list_public_datasets(config["dataset"]),
        "metrics": [task.score],
        "model-index": [{"name": title, "results": [result]}],
    }
    return {name: value for name, value in header.items() if value}


def list_public_datasets(dataset: Values) -> list[str]:
    """Name the run's data set for a hub's link; [] for a user's own data."""
    name = dataset["name"]
    if name == "hf" and not Path(dataset["path"]).exists():
        return [dataset["path"]]
    return [] if name in ("hf", "memory", "npz", "sites", "pfllib", "flbench") else [name]


def _describe_outputs(run: Trained) -> str:
    """Describe the network's output, such as logits of its classes."""
    task = configured_task(run.config)
    if task.output:
        axes = "[samples, length, tokens]" if task is NEXT_TOKEN else "[samples, 1]"
        return f"{task.output}, `{axes}`"
    things = "classes" if task is CLASSIFICATION else "labels"
    if run.classes:
        return f"logits of the {things} {', '.join(map(_format_cell, run.classes))}, in this order"
    classes = sum(name.startswith("label_") for name in run.clients.columns)
    return f"logits of the {things}{f' 0 to {classes - 1}' if classes else ''}"


def _read_baseline(run: Trained, baseline: Trained) -> pd.Series:
    """Return FedAvg's fine-tuned score by client. Raises FedpflError for another run."""
    clients = baseline.clients
    column = f"ft_{configured_task(run.config).score}"
    obstacle = ""
    if baseline.config["method"]["name"] != "fedavg":
        obstacle = "is no run of FedAvg"
    elif baseline.summary.get("data") != run.summary.get("data"):
        obstacle = f"has other samples or another split than {run.path}"
    elif column not in clients or clients[column].isna().all():
        obstacle = "was not fine-tuned; run it with eval.finetune_epochs=5"
    if obstacle:
        raise FedpflError(f"--baseline {baseline.path} {obstacle}")
    return clients.set_index(clients["client"].astype(int))[column]


def _format_cell(value: Any) -> str:
    """Escape a text for a cell of a Markdown table."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return escape_markdown(value)
