"""Write a model card for exported models: their data, training and accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml
from jinja2 import Environment

from fedpfl.config.messages import describe_choice
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import CLASSIFICATION, REGRESSION, configured_task
from fedpfl.report.names import DATASET_TITLES, METHOD_TITLES

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
    "by `mean` and `std` (pixels are divided by 255 before), as the file's metadata has them.",
    "torchscript": "`torch.jit.load(FILE)(x)` are the logits, `[samples, classes]`.",
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
) -> str:
    """Return card.md for exported models.

    Args:
        run: with the models.
        format_name: of the files.
        files: the name of each client's file, by the client's number.
        baseline: a run of FedAvg over the same samples, to stand beside.
        finetuned: whether the files are the models after fine-tuning.

    Raises:
        FedpflError: if the baseline has other samples, is no FedAvg, or was not fine-tuned.
    """
    # ---- Step 1: the table of clients, by heading.
    config = run.config
    task = configured_task(config)
    unit = f", {task.unit}" if task.unit else ""
    clients = run.clients.set_index(run.clients["client"].astype(int)).loc[[*files]]
    table = {
        "file": [*files.values()],
        "client": [run.client_names.get(number, number) for number in files],
        "trained on": clients["train"].astype(int),
        "tested on": clients["test"].astype(int),
        f"{task.score_word}{unit}": clients[task.score],
    }
    if f"ft_{task.score}" in clients:
        table[f"after fine-tuning{unit}"] = clients[f"ft_{task.score}"]
    if baseline:
        table[f"FedAvg+FT{unit}"] = _read_baseline(run, baseline).loc[[*files]]

    # ---- Step 2: the header that model hubs read, and the card.
    inputs = run.summary.get("input", {})
    method, dataset = config["method"]["name"], config["dataset"]["name"]
    header = {
        "library_name": "pytorch",
        "pipeline_tag": PIPELINES.get(inputs.get("kind"), "other"),
        "tags": ["federated-learning", "personalized-federated-learning", "fedpfl", method],
        "metrics": [task.score],
    }
    rounds = run.rounds
    jinja = Environment(trim_blocks=True, keep_trailing_newline=True)
    jinja.filters |= {"cell": _format_cell, "choice": describe_choice}
    return jinja.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        header=yaml.safe_dump(header, sort_keys=False),
        title=f"{METHOD_TITLES.get(method, method)} on {DATASET_TITLES.get(dataset, dataset)}",
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


def _describe_outputs(run: Trained) -> str:
    """Describe the network's output, such as logits of its classes."""
    task = configured_task(run.config)
    if task is REGRESSION:
        return "a number, `[samples, 1]`"
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
    text = str(value)
    for character in "\\|`*_<>&[]":
        text = text.replace(character, f"\\{character}")
    return text
