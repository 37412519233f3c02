"""Personal models as modules that stand alone: they take samples as a data set holds them."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fedpfl.data import Federation
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError, error_text, missing_extra
from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch, Method
from fedpfl.models import Net

if TYPE_CHECKING:
    from fedpfl.runner.library import Trained

PROBE_SAMPLES = 5
"""Samples by which an exported module is compared with the run's own predictions."""


class InputScaling(nn.Module):
    """Scale samples as training did; pixels and features become float32, token ids stay.

    Args:
        federation: What the network was trained on.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, federation: Federation):
        super().__init__()
        self.is_image = federation.x.dtype == torch.uint8
        self.is_scaled = bool(federation.mean)
        trailing_axes = [1] * (federation.x.dim() - 2)
        for name, values in (("mean", federation.mean), ("std", federation.std)):
            constants = torch.tensor(values, dtype=torch.float32).view((-1, *trailing_axes))
            # In no state_dict: the network's own entries are all that `personal` has.
            self.register_buffer(name, constants, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the network takes, `[samples, ...]`."""
        if not self.is_scaled:
            return x
        values = x.to(torch.float32)
        if self.is_image:
            values = values / 255
        return (values - self.mean) / self.std


class InputScalingHook:
    """Scale the samples of a network's calls, and keep the names of its state_dict."""

    def __init__(self, federation: Federation):
        self._scaling = InputScaling(federation)

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the inputs of a call, the first one scaled."""
        samples, *others = inputs
        scaling = self._scaling.to(samples.device)
        return (scaling(samples), *others)


class PersonalNetwork(nn.Module):
    """A client's network behind the scaling of its input."""

    def __init__(self, scaling: InputScaling, network: nn.Module):
        super().__init__()
        self.scaling = scaling
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[samples, classes]` of samples `[samples, ...]`."""
        return self.network(self.scaling(x)).float()


class PersonalRule(nn.Module):
    """A method's own way to predict, such as a mixture of two networks.

    Args:
        scaling: Of the input.
        method: Whose `predict` it is.
        net: The network.
        params: The client's evaluated model.
        statistics: Of BatchNorm, by the model's role.
    """

    def __init__(
        self,
        scaling: InputScaling,
        method: Method,
        net: Net,
        params: Tree,
        statistics: dict[str, Tree],
    ):
        super().__init__()
        self.scaling = scaling
        self._method = method
        self._net = net
        # Leaves as buffers, so that export formats find them; the template has their form.
        self._template = {"params": params, "statistics": statistics}
        for number, leaf in enumerate(tree.leaves(self._template)):
            self.register_buffer(
                f"value_{number}",
                leaf.detach().cpu().clone(),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[samples, classes]` of samples `[samples, ...]`."""
        values = iter(self.buffers(recurse=False))
        filled = tree.map(lambda _: next(values), self._template)
        bound = self._net.bind(filled["statistics"])
        batch = Batch(self.scaling(x), None)  # type: ignore[arg-type]
        return self._method.predict(bound, filled["params"], batch).float()


# ---- Formats


def write_state(run: Trained, client: int | str, path: Path) -> None:
    """Write the `state_dict` of `personal` by `torch.save`."""
    torch.save(run.personal(client), path)


def write_safetensors(run: Trained, client: int | str, path: Path) -> None:
    """Write the network's `state_dict`, with what its input must be in the metadata.

    Raises:
        FedpflError: The method predicts by more than one network's weights.
    """
    if not isinstance(run.personal_module(client), PersonalNetwork):
        raise FedpflError(
            f"method={run.config['method']['name']} predicts by a rule of its own, which weights "
            "alone do not hold; use --format torchscript or onnx"
        )
    values = run.personal(client)
    facts = {
        "input": run.summary.get("input"),
        "classes": list(run.classes),
    }
    metadata = {key: json.dumps(value) for key, value in facts.items()}
    safetensors.torch.save_file(dict(values), path, metadata=metadata)


def write_torchscript(run: Trained, client: int | str, path: Path) -> None:
    """Write a module for `torch.jit.load`. Raises FedpflError where it cannot be one."""
    module, example = _module_and_samples(run, client)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing's advice, which the comparison below makes moot
        try:
            traced = torch.jit.trace(
                module,
                (example[:2],),
                check_trace=False,
            )
            torch.jit.save(traced, path)
        except Exception as error:  # a network may do anything
            raise _no_such_format(run, "torchscript", error) from None
    loaded = torch.jit.load(path)
    _require_equal_predictions(run, client, "torchscript", module, loaded)


def write_onnx(run: Trained, client: int | str, path: Path) -> None:
    """Write an ONNX file, input `x`, output `logits`. Raises FedpflError where it cannot be one."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - what torch's exporter needs
    except ImportError:
        raise missing_extra("--format onnx needs packages that are absent", "onnx") from None

    # ---- Step 2: export, for any number of samples, and read the file again.
    module, example = _module_and_samples(run, client)
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")

        # ---- Step 1: the packages, and what the exporter would print.
        try:
            torch.onnx.export(
                module,
                (example[:2],),
                path,
                input_names=["x"],
                output_names=["logits"],
                dynamic_shapes={"x": {0: "samples"}},
                external_data=False,
                verbose=False,
            )
            _write_onnx_metadata(run, path)
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        except Exception as error:  # what the exporter knows no operator for
            raise _no_such_format(run, "onnx", error) from None

    # ---- Step 3: the file answers as the run does.
    def predict(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {"x": x.numpy()})[0])

    _require_equal_predictions(run, client, "onnx", module, predict)


def _write_onnx_metadata(run: Trained, path: Path) -> None:
    """Write what names features and classes have into an ONNX file."""
    import onnx

    facts = {"features": run.summary.get("input", {}).get("features"), "classes": list(run.classes)}
    model = onnx.load(path)
    for key, names in facts.items():
        if names:
            model.metadata_props.add(key=key, value=json.dumps(names))
    onnx.save(model, path)


WRITERS: dict[str, tuple[str, Callable[[Trained, int | str, Path], None]]] = {
    "pt": (".pt", write_state),
    "safetensors": (".safetensors", write_safetensors),
    "torchscript": (".pt", write_torchscript),
    "onnx": (".onnx", write_onnx),
}
"""The ending and the writer of each format."""


def _module_and_samples(run: Trained, client: int | str) -> tuple[nn.Module, Tensor]:
    """Return a client's module and some of its training samples, two at least."""
    samples, _ = run.samples(client, "train")
    repeated = torch.cat([samples] * PROBE_SAMPLES)[:PROBE_SAMPLES]
    return run.personal_module(client), repeated


def _require_equal_predictions(
    run: Trained, client: int | str, format_name: str, module: nn.Module, exported: Any
) -> None:
    """Raise FedpflError where an exported model answers otherwise than the run.

    It is asked about other numbers of samples than it was made with. A run in bf16 is compared as
    its own model answers in fp32.
    """
    samples, _ = run.samples(client, "train")
    is_exact = run.config.get("engine", {}).get("precision", "fp32") == "fp32"
    for count in (PROBE_SAMPLES, 1):
        x = torch.cat([samples] * count)[:count]
        with torch.no_grad():
            expected = run.predict(client, x) if is_exact else module(x)
            try:
                answer = exported(x)
            except Exception as error:
                raise _no_such_format(run, format_name, error) from None
        # Large logits are rounded in larger steps.
        scale = max(1.0, float(expected.abs().max()))
        if not torch.allclose(answer, expected, rtol=1e-3, atol=1e-4 * scale):
            raise _no_such_format(run, format_name, "it answers otherwise than the run")


def _no_such_format(run: Trained, format_name: str, reason: Exception | str) -> FedpflError:
    text = reason if isinstance(reason, str) else error_text(reason, with_class=True)
    return FedpflError(
        f"the models of method={run.config['method']['name']} with model="
        f"{run.config['model']['name']} cannot be written as {format_name} "
        f"({text.splitlines()[0][:200]}); try another --format"
    )
