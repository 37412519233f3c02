"""Read files with a network's state_dict, from which it may start."""

import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import torch as safetensors
from torch import Tensor

from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.records import Values

# torch.hub names its files so.
HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.\w+$")


ADAPTER_CONFIG, ADAPTER_VALUES = "adapter_config.json", "adapter_model.safetensors"
"""Files of peft's folders."""
ADAPTER_PREFIX = "base_model.model."


@dataclass(frozen=True, eq=False)
class Weights:
    """Initial values of a network.

    Attributes:
        values: Tensors by name.
        path: Their file or run.
        samples_digest: Digest of the run's data set; "" for a file.
        trained_on: Training samples of the run, as indices in its data set.
        caveat: The run's note on its own initial weights.
    """

    values: dict[str, Tensor]
    path: str
    samples_digest: str = ""
    trained_on: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    caveat: str = ""


def read_weights(path: Path) -> Weights:
    """Read a file of `torch.save(network.state_dict(), path)` or of safetensors, on the CPU.

    Raises:
        FedpflError: If it is absent or damaged, also by the hash in its name, where it has one.
    """
    # ---- Step 1: the file, whole by the hash in its name.
    if not path.is_file():
        raise FedpflError(
            f"model.weights: there is no file {path}; put it there, or give its full path"
        )
    if match := HASH_IN_NAME.search(path.name):
        hash_in_name = match[1]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if not digest.startswith(hash_in_name):
            beginning = digest[: len(hash_in_name)]
            raise FedpflError(
                f"model.weights: SHA-256 of {path} begins with {beginning}; fetch it again"
            )

    # ---- Step 2: its values, read without running any code.
    try:
        if path.suffix == ".safetensors":
            return Weights(safetensors.load_file(path), str(path))
        _require_checksums(path)
        values: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler raises many kinds
        reason = error_text(error, with_class=True)
        # Torch's message goes on with advice to load code that could do anything.
        if "Weights only" in reason:
            reason = "it is no file of torch.save's, or holds more than tensors"
        raise FedpflError(f"model.weights: {path} cannot be read ({reason})") from None

    # ---- Step 3: they must be tensors by name.
    is_mapping = isinstance(values, Mapping)
    if not is_mapping or not all(isinstance(value, Tensor) for value in values.values()):
        raise FedpflError(
            f"model.weights: {path} must hold a network's state_dict and nothing else"
        )
    return Weights(dict(values), str(path))


def _require_checksums(path: Path) -> None:
    """Raise ValueError for a zip archive with a wrong checksum, which torch does not compare."""
    if not zipfile.is_zipfile(path):  # torch's older format has no checksums
        return
    with zipfile.ZipFile(path) as archive:
        damaged_member = archive.testzip()
    if damaged_member is not None:
        raise ValueError(f"its part {damaged_member} is damaged")


def read_adapter(folder: Path, options: Values) -> Weights:
    """Read low-rank additions, and the head if it is there, from a folder of peft's.

    Args:
        folder: With the two files.
        options: Of the configured adapter.

    Raises:
        FedpflError: The adapter is not the configured one, or a file is damaged.
    """
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    saved = {
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "rslora": config.get("use_rslora", False),
    }
    if any(options.get(key) != value for key, value in saved.items()):
        words = " ".join(f"adapter.{key}={json.dumps(value)}" for key, value in saved.items())
        raise FedpflError(
            f"model.weights: {folder} has another adapter; set adapter=lora {words}, and as"
            f" adapter.layers its {config.get('target_modules')}"
        )
    values: dict[str, Tensor] = {}
    for name, value in read_weights(folder / ADAPTER_VALUES).values.items():
        own_name = name.removeprefix(ADAPTER_PREFIX)
        if ".lora_" in own_name:
            own_name = own_name.removesuffix(".weight")
            value = value[None] if value.dim() == 2 else value
        values[own_name] = value
    return Weights(values, str(folder))


def write_adapter(folder: Path, config: Values, values: Mapping[str, Tensor]) -> None:
    """Write low-rank additions, and the head, as a folder of peft's.

    Args:
        folder: A new one.
        config: What adapter_config.json says beside the kind.
        values: By the network's own names; additions of one block.
    """
    folder.mkdir()
    entries = {}
    for name, value in values.items():
        is_addition = ".lora_" in name
        is_stacked = is_addition and value.dim() == 3
        own_name = f"{ADAPTER_PREFIX}{name}{'.weight' * is_addition}"
        entries[own_name] = (value[0] if is_stacked else value).contiguous()
    safetensors.save_file(entries, folder / ADAPTER_VALUES, {"format": "pt"})
    text = json.dumps({"peft_type": "LORA", "bias": "none", **config}, indent=2)
    (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
