"""A model card: what exported models are, whose data they learnt from, and how good they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from fedpfl.config.messages import describe_choice
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import CLASSIFICATION, REGRESSION, Task, configured_task
from fedpfl.report.names import DATASET_TITLES, METHOD_TITLES

if TYPE_CHECKING:
    from fedpfl.runner.library import Trained

PIPELINES = {
    "images": "image-classification",
    "token ids": "text-classification",
    "signals": "tabular-classification",
}
USES = {
    "pt": "`torch.load(FILE, weights_only=True)` is what `fedpfl.load(RUN).personal(CLIENT)` returns.",
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
    run: Trained, format_name: str, files: Mapping[int, str], baseline: Trained | None = None
) -> str:
    """Return card.md for exported models.

    Args:
        run: Whose models they are.
        format_name: Of the files.
        files: The name of each client's file, by the client's number.
        baseline: A run of FedAvg over the same samples, to stand beside.

    Raises:
        FedpflError: The baseline is of other samples, is no FedAvg, or was not fine-tuned.
    """
    # ---- Step 1: what the run was, in the words of its configuration.
    config = run.config
    summary = run.summary
    task = configured_task(config)
    method = config["method"]["name"]
    title = METHOD_TITLES.get(method, method)
    dataset = config["dataset"]["name"]
    inputs = summary.get("input", {})
    header = {
        "library_name": "pytorch",
        "pipeline_tag": PIPELINES.get(inputs.get("kind"), "other"),
        "tags": ["federated-learning", "personalized-federated-learning", "fedpfl", method],
        "metrics": [task.score],
    }

    # ---- Step 2: the versions that trained it.
    environment = summary.get("environment", {})
    versions = ", ".join(
        f"{name} {environment[name]}"
        for name in ("fedpfl", "torch", "python")
        if environment.get(name)
    )

    # ---- Step 3: the card, below the header that model hubs read.
    lines = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n",
        f"# {title} on {DATASET_TITLES.get(dataset, dataset)}: a model per client\n",
        f"Trained by personalized federated learning, {len(run)} clients, "
        f"{run.round} rounds, seed {config['seed']}.\n",
        "## Use\n",
        f"{USES[format_name]}\n",
        f"- input: {KINDS.get(inputs.get('kind'), 'as the data set holds it')}, "
        f"`[samples, {', '.join(map(str, inputs.get('shape', [])))}]`",
        *_feature_lines(inputs),
        f"- output: {_describe_outputs(run)}\n",
        "## Training\n",
        f"- method: {describe_choice(config['method'])}",
        f"- network: {describe_choice(config['model'])}",
        f"- data: {describe_choice(config['dataset'])}",
        f"- split: {describe_choice(config['partition'])}",
        f"- privacy: {summary.get('privacy') or 'none was promised; a model may tell of its samples'}",
        f"- versions: {versions}",
        "- again: `fedpfl.run(yaml.safe_load(open('config.yaml')))`, the file beside this one\n",
        f"## {task.score_word[0].upper()}{task.score_word[1:]}\n",
        *_accuracy_lines(run, files, baseline),
    ]
    return "\n".join(lines)


def _feature_lines(inputs: Mapping[str, Any]) -> list[str]:
    """Return the order of a table's features; it is no other table's own."""
    features = inputs.get("features")
    if not features:
        return []
    line = f"- features: {', '.join(map(_escape_cell, features))}, in this order"
    if any("=" in name for name in features):
        line += "; `ward=a` is 1 where column `ward` has `a`, else 0"
    return [line]


def _describe_outputs(run: Trained) -> str:
    """Return what a network answers, such as logits, and of which classes they are."""
    task = configured_task(run.config)
    if task is REGRESSION:
        return "a number, `[samples, 1]`"
    things = "classes" if task is CLASSIFICATION else "labels"
    if run.classes:
        return f"logits of the {things} {', '.join(_escape_cell(name) for name in run.classes)}, in this order"
    classes = sum(name.startswith("label_") for name in run.clients.columns)
    return f"logits of the {things}{f' 0 to {classes - 1}' if classes else ''}"


def _accuracy_lines(run: Trained, files: Mapping[int, str], baseline: Trained | None) -> list[str]:
    """Return the table of clients, and what must be known to read it."""
    # ---- Step 1: the columns that the run has, and FedAvg's.
    clients = run.clients.set_index("client", drop=False)
    clients.index = clients.index.astype(int)
    baseline_accuracy = _read_baseline(run, baseline) if baseline else None
    task = configured_task(run.config)
    unit = f", {task.unit}" if task.unit else ""
    columns = {
        task.score: f"{task.score_word}{unit}",
        f"ft_{task.score}": f"after fine-tuning{unit}",
    }
    columns = {key: text for key, text in columns.items() if key in clients}
    headings = ["file", "client", "trained on", "tested on", *columns.values()]
    if baseline_accuracy is not None:
        headings.append(f"FedAvg+FT{unit}")

    # ---- Step 2: a row per exported client.
    names = run.client_names
    rows = []
    for number, file in files.items():
        client = clients.loc[number]
        cells = [
            f"`{file}`",
            _escape_cell(names.get(number, str(number))),
            f"{client['train']:.0f}",
            f"{client['test']:.0f}",
            *(_format_score(client[key], task) for key in columns),
        ]
        if baseline_accuracy is not None:
            cells.append(_format_score(baseline_accuracy.get(number, math.nan), task))
        rows.append(cells)

    # ---- Step 3: of which round the scores are; they may be older than the models.
    rounds = run.rounds
    evaluated = rounds["round"][rounds[task.score].notna()]
    last_evaluation = int(evaluated.iloc[-1]) if len(evaluated) else 0
    subject = "Percent of" if task.unit else "On"
    note = f"{subject} each client's own test samples. The files are the models before fine-tuning."
    if last_evaluation != run.round:
        scores = "accuracies" if task is CLASSIFICATION else "scores"
        note += (
            f" They are those after round {run.round}, and {scores} those after round "
            f"{last_evaluation}."
        )
    if run.config.get("eval", {}).get("classes") == "own":
        note += " Predictions were limited to the classes that the client trained on."
    return [*_format_table(headings, rows), "", note, ""]


def _read_baseline(run: Trained, baseline: Trained) -> dict[int, float]:
    """Return FedAvg's score after fine-tuning, by client. Raises FedpflError for another run."""
    if baseline.config["method"]["name"] != "fedavg":
        raise FedpflError(f"--baseline {baseline.path} is no run of FedAvg")
    if baseline.summary.get("data") != run.summary.get("data"):
        raise FedpflError(
            f"--baseline {baseline.path} has other samples or another split than {run.path}"
        )
    clients = baseline.clients
    column = f"ft_{configured_task(run.config).score}"
    if column not in clients or clients[column].isna().all():
        raise FedpflError(
            f"--baseline {baseline.path} was not fine-tuned; run it with eval.finetune_epochs=5"
        )
    return dict(zip(clients["client"].astype(int), clients[column], strict=True))


def _format_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    cells: list[Sequence[str]] = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(row)} |" for row in cells]


def _format_score(value: Any, task: Task) -> str:
    if value is None or math.isnan(value):
        return ""
    return f"{value:.2f}" if task.unit else f"{value:.4g}"


def _escape_cell(text: str) -> str:
    """Return text that neither ends a table's cell nor is read as HTML or emphasis."""
    for character in "\\|`*_<>&[]":
        text = text.replace(character, f"\\{character}")
    return text
