"""Export a run: its personal models as files, and its record to loggers."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedpfl.data.state_dict import write_adapter
from fedpfl.ground import files, lock
from fedpfl.ground.errors import FedpflError, error_text, missing_extra
from fedpfl.ground.identity import identity
from fedpfl.ground.records import Record, Values
from fedpfl.ground.tasks import NEXT_TOKEN
from fedpfl.record.loggers import make_loggers
from fedpfl.runner.card import format_card
from fedpfl.runner.deploy import PersonalNetwork, pack_entries
from fedpfl.runner.header import make_run_info
from fedpfl.runner.library import Trained

PROBE_SAMPLES = 5
"""Samples on which an exported model is compared with the run's own predictions."""


@dataclass(frozen=True)
class ClientModel:
    """Name a model to export.

    Attributes:
        run: with the models.
        client: its number or name.
        finetuned: whether it is the model after fine-tuning.
    """

    run: Trained
    client: int | str
    finetuned: bool

    def list_entries(self) -> dict[str, Tensor]:
        """Return the entries by name."""
        return self.run.personal(self.client, self.finetuned)

    def make_module(self) -> nn.Module:
        """Return the model as a module."""
        return self.run.personal_module(self.client, self.finetuned)

    def predict_logits(self, x: Tensor) -> Tensor:
        """Return the run's own predictions."""
        return self.run.predict(self.client, x, self.finetuned)

    @property
    def examples(self) -> Tensor:
        """Return some of the client's training samples, repeated if it has few."""
        samples, _ = self.run.samples(self.client, "train")
        return torch.cat([samples] * PROBE_SAMPLES)[:PROBE_SAMPLES]


def write_state(model: ClientModel, path: Path) -> None:
    """Write the `state_dict` of `personal` by `torch.save`."""
    torch.save(model.list_entries(), path)


def write_safetensors(model: ClientModel, path: Path) -> None:
    """Write the network's `state_dict`, with what its input must be in the metadata.

    Raises:
        FedpflError: The method predicts by more than one network's weights.
    """
    run = model.run
    if not isinstance(model.make_module(), PersonalNetwork):
        raise FedpflError(
            f"method={run.config['method']['name']} predicts by a rule of its own, which weights "
            "alone do not hold; use --format torchscript or onnx"
        )
    path.write_bytes(pack_entries(model.list_entries(), run.summary["input"], run.classes))


def write_peft(model: ClientModel, path: Path) -> None:
    """Write a folder for `peft.PeftModel.from_pretrained`, of low-rank additions and the head.

    Raises:
        FedpflError: The run has no such additions.
    """
    # ---- Step 1: what trains, which is the head beside additions.
    config = model.run.config
    options = config["adapter"]
    leaves = dict(model.run.network().named_parameters())
    trained = [name for name, leaf in leaves.items() if leaf.requires_grad]
    additions = [name for name in trained if ".lora_" in name]
    blocks = {len(leaves[name]) for name in additions if leaves[name].dim() == 3}
    is_plain = isinstance(model.make_module(), PersonalNetwork) and options["pairs"] == 1
    # peft reads past names that it does not know.
    has_residue = any(name.endswith(".lora_residue") for name in additions)
    if not additions or blocks > {1} or not is_plain or has_residue:
        raise FedpflError(
            "--format peft is for adapter=lora with one pair in a layer, whose rows are one block,"
            " and no residue beside it; use --format safetensors"
        )

    # ---- Step 2: the folder.
    layers = sorted({name.rpartition(".")[0] for name in additions})
    heads = sorted({name.rpartition(".")[0] for name in {*trained} - {*additions}})
    facts: Record = {
        "base_model_name_or_path": config["model"].get("arch"),
        "r": int(torch.tensor(options["rank"]).max()),  # smaller ranks are filled up by zeros
        "lora_alpha": options["alpha"],
        "use_rslora": options["rslora"],
        "target_modules": layers,
        "modules_to_save": heads or None,
    }
    if config["model"]["name"] == "hf":
        facts["task_type"] = "CAUSAL_LM" if config["task"] == NEXT_TOKEN.name else "SEQ_CLS"
    entries = model.list_entries()
    write_adapter(path, facts, {name: entries[name] for name in trained})


def write_torchscript(model: ClientModel, path: Path) -> None:
    """Write a module for `torch.jit.load`. Raises FedpflError where it cannot be one."""
    with _explain_failure(model, "torchscript"):
        examples = (model.examples[:2],)
        torch.jit.save(torch.jit.trace(model.make_module(), examples, check_trace=False), path)
    _require_equal_predictions(model, "torchscript", torch.jit.load(path))


def write_program(model: ClientModel, path: Path) -> None:
    """Write a program for `torch.export.load`. Raises FedpflError where it cannot be one."""
    sizes = ({0: torch.export.Dim("samples")},)
    with _explain_failure(model, "pt2"):
        examples = (model.examples[:2],)
        program = torch.export.export(model.make_module(), examples, dynamic_shapes=sizes)
        torch.export.save(program, path)
    _require_equal_predictions(model, "pt2", torch.export.load(path).module())


def write_mlflow(model: ClientModel, path: Path) -> None:
    """Write a folder for `mlflow.pyfunc.load_model`, an ONNX model with its signature.

    Raises:
        FedpflError: It cannot be written, or a package is absent.
    """
    try:
        import mlflow.onnx
        import onnx
    except ImportError:
        raise missing_extra(
            "--format mlflow needs packages that are absent", "mlflow,onnx"
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        write_onnx(model, file)
        x = model.examples
        signature = mlflow.models.infer_signature(x.numpy(), model.predict_logits(x).numpy())
        mlflow.onnx.save_model(
            onnx_model=onnx.load(file),
            path=path,
            signature=signature,
            pip_requirements=mlflow.onnx.get_default_pip_requirements(),
            onnx_execution_providers=["CPUExecutionProvider"],
        )


def write_onnx(model: ClientModel, path: Path) -> None:
    """Write an ONNX file, input `x`, output `logits`. Raises FedpflError where it cannot be one."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - what torch's exporter needs
    except ImportError:
        raise missing_extra("--format onnx needs packages that are absent", "onnx") from None

    # ---- Export for any number of samples, and read the file again.
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    with _explain_failure(model, "onnx"), contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(
            model.make_module(),
            (model.examples[:2],),
            path,
            input_names=["x"],
            output_names=["logits"],
            dynamic_shapes={"x": {0: "samples"}},
            external_data=False,
            verbose=False,
        )
        _write_onnx_metadata(model.run, path)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    # ---- The file must answer as the run does.
    def predict(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {"x": x.numpy()})[0])

    _require_equal_predictions(model, "onnx", predict)


def _write_onnx_metadata(run: Trained, path: Path) -> None:
    """Write what names features and classes have into an ONNX file."""
    import onnx

    facts = {"features": run.summary.get("input", {}).get("features"), "classes": run.classes}
    graph = onnx.load(path)
    for key, names in facts.items():
        if names:
            graph.metadata_props.add(key=key, value=json.dumps(names))
    onnx.save(graph, path)


WRITERS: dict[str, tuple[str, Callable[[ClientModel, Path], None]]] = {
    "pt": (".pt", write_state),
    "safetensors": (".safetensors", write_safetensors),
    "peft": ("", write_peft),
    "torchscript": (".pt", write_torchscript),
    "pt2": (".pt2", write_program),
    "onnx": (".onnx", write_onnx),
    "mlflow": ("", write_mlflow),
}
"""The ending and the writer of each format."""


def _require_equal_predictions(
    model: ClientModel, format_name: str, exported: Callable[[Tensor], Tensor]
) -> None:
    """Raise FedpflError if an exported model answers unlike the run.

    A run in bf16 is compared with its own module in fp32. Numbers of samples differ from the export.
    """
    run, module, samples = model.run, model.make_module(), model.examples
    is_exact = run.config.get("engine", {}).get("precision", "fp32") == "fp32"
    for x in (samples, samples[:1]):
        with torch.no_grad():
            expected = model.predict_logits(x) if is_exact else module(x)
            with _explain_failure(model, format_name):
                answer = exported(x)
        # Large logits are rounded in larger steps.
        scale = max(1.0, float(expected.abs().max()))
        if not torch.allclose(answer, expected, rtol=1e-3, atol=1e-4 * scale):
            raise _no_such_format(run, format_name, "it does not answer as the run does")


@contextlib.contextmanager
def _explain_failure(model: ClientModel, format_name: str) -> Iterator[None]:
    """Turn any error into one line: a network may do anything, and an exporter lacks operators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice, which the comparison with the run makes moot
        try:
            yield
        except Exception as error:
            raise _no_such_format(model.run, format_name, error) from None


def _no_such_format(run: Trained, format_name: str, reason: Exception | str) -> FedpflError:
    text = reason if isinstance(reason, str) else error_text(reason, with_class=True)
    return FedpflError(
        f"the models of method={run.config['method']['name']} with model="
        f"{run.config['model']['name']} cannot be written as {format_name} "
        f"({text.splitlines()[0][:200]}); try another --format"
    )


def write_models(
    run: Trained,
    out: Path,
    format_name: str = "pt",
    clients: Sequence[int | str] | None = None,
    baseline: Trained | None = None,
    finetuned: bool = False,
    license: str = "",
) -> int:
    """Write clients' personal models into a new folder, all or none.

    Beside them stand `README.md` and `config.yaml`.

    Args:
        run: with the models.
        out: The folder.
        format_name: One of `WRITERS`.
        clients: Their numbers or names; None: all of them.
        baseline: A run of FedAvg that the card compares with.
        finetuned: Whether they are the models after fine-tuning.
        license: For the card, as model hubs name it; "" for none.

    Returns:
        How many there are.

    Raises:
        FedpflError: The folder exists or cannot be written, there is no such client, or a model
            cannot be written in this format.
    """
    # ---- Step 1: names of files, and the card
    if out.exists() and not (out.is_dir() and next(out.iterdir(), None) is None):
        raise FedpflError(f"{out} exists; name a new folder")
    numbers = [*range(len(run))] if clients is None else [run.client_number(c) for c in clients]
    ending, write = WRITERS[format_name]
    files = {number: f"{_file_stem(run, number)}{ending}" for number in numbers}
    card = format_card(
        run=run,
        format_name=format_name,
        files=files,
        baseline=baseline,
        finetuned=finetuned,
        license=license,
    )

    # ---- Step 2: into a folder beside, which gets its name once all is there
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
            models = Path(folder) / "models"
            models.mkdir()
            for number, name in files.items():
                write(ClientModel(run, number, finetuned), models / name)
            (models / "README.md").write_text(card, encoding="utf-8")
            shutil.copyfile(run.path / "config.yaml", models / "config.yaml")
            models.rename(out)  # refused where something is
    except (OSError, RuntimeError) as error:  # torch hides a full disk behind the second
        raise FedpflError(
            f"cannot write {out}: {error_text(error)}; choose a new folder where there is room"
        ) from None
    return len(files)


def _file_stem(run: Trained, number: int) -> str:
    """Return the name of a client's file: its own name if it is plain and unique."""
    name = run.client_names.get(number, "")
    is_plain = re.fullmatch(r"[\w][\w .-]{0,99}", name) is not None
    is_alone = [*map(str.casefold, run.client_names.values())].count(name.casefold()) == 1
    return name if is_plain and is_alone else f"client{number}"


def send_to_loggers(run: Trained, options: Values) -> int:
    """Send a run that is over to loggers, but for rounds that they have.

    Args:
        run: which is over.
        options: of each logger, by name.

    Returns:
        How many rounds the run has.

    Raises:
        FedpflError: for a run that is being written, and for a logger that fails.
    """
    # ---- Step 1: describe the run as it would have described itself.
    config = run.config
    summary = {key: value for key, value in run.summary.items() if key != "digest"}
    group = _find_logger_group(run)
    rounds_done = len(run.rounds)
    engine_record = summary.get("engine", {})
    backend = engine_record.get("backend")
    # Where nothing was to choose, the name that was asked for is recorded.
    if (backend, engine_record.get("device")) == ("auto", "cpu"):
        backend = "loop"
    run_info = make_run_info(config, run.path, summary, group, backend, start_round=rounds_done)

    # ---- Step 2: each logger takes the rounds that it lacks, while the run is locked.
    with files.explain_write_errors(run.path):
        lock_handle = lock.acquire_lock(run.path)
    try:
        for mirror in make_loggers(options):
            try:
                mirror.on_begin(run_info)
                mirror.on_end("interrupted" if run.status == "running" else run.status, summary)
            except Exception as error:
                logger_name = type(mirror).__name__
                raise FedpflError(
                    f"{run.path} is not logged, {logger_name} failed: {error_text(error)}"
                ) from error
            finally:
                with contextlib.suppress(Exception):
                    mirror.on_end("failed", {})  # does nothing where it has ended
    finally:
        os.close(lock_handle)
    return rounds_done


def _find_logger_group(run: Trained) -> str:
    """Return the folder that groups runs, as loggers name it; elsewhere the data set's name."""
    config = run.config
    parts = run.path.resolve().parts
    default_parts = (config["method"]["name"], identity(config), f"seed{config['seed']}")
    if parts[-3:] == default_parts and len(parts) > 4:
        return parts[-4]
    return config["dataset"]["name"]
