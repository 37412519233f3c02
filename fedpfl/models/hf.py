"""Language models of Hugging Face's transformers, from a folder or by their configuration."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fedpfl.ground.errors import did_you_mean, missing_extra
from fedpfl.ground.records import Record
from fedpfl.ground.vision import load_torchvision
from fedpfl.models.shapes import answer_axes, tokens

FLAT_MASKED = ("deberta", "deberta-v2")
"""Kinds of encoders that take a mask `[batch, length]` alone."""


def load_transformers() -> Any:
    """Import transformers. Raises FedpflError where it is not installed."""
    load_torchvision()  # which it imports, and which may not load by itself
    try:
        import transformers
    except ImportError:
        raise missing_extra("model=hf needs the package transformers", "lm") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def hf(
    shape: tuple[int, ...], classes: int, arch: str = "bert", config: dict[str, Any] | None = None
) -> nn.Module:
    """Build a network for token ids: a classifier, or with task=next_token a causal model.

    Args:
        shape: Of the samples.
        classes: Number of classes; of task=next_token the size of the vocabulary.
        arch: A kind of model, such as bert, distilbert or gpt2, the file config.json, or a folder
            that `save_pretrained` has written. Without a folder all values are drawn.
        config: Values in the place of those of its configuration.

    Raises:
        ValueError: There is no such model, or it does not fit the task.
    """
    # ---- Step 1: the configuration.
    library = load_transformers()
    is_causal = bool(answer_axes(shape))
    values: Record = {
        **(config or {}),
        "pad_token_id": getattr(shape, "pad", 0),
        "use_cache": False,
    }
    if is_causal:
        values.setdefault("vocab_size", classes)
    else:
        values["num_labels"] = classes
    own_config = _read_config(library, arch, values)
    is_encoder = type(own_config) in library.MODEL_FOR_MASKED_LM_MAPPING
    if own_config.is_encoder_decoder or (is_encoder and is_causal):
        advice = "a decoder such as gpt2 or llama" if is_causal else "an encoder or a decoder"
        raise ValueError(f"arch={arch} is of the kind {own_config.model_type}; take {advice}")
    longest = getattr(own_config, "max_position_embeddings", None) or tokens(shape)
    if tokens(shape) > longest:
        raise ValueError(f"arch={arch} reads {longest} tokens; set dataset.length={longest}")

    # ---- Step 2: the network, with attention as plain products, which vmap takes.
    maker = getattr(library, f"AutoModelFor{'CausalLM' if is_causal else 'SequenceClassification'}")
    options: Record = {"attn_implementation": "eager", "dtype": torch.float32}
    if arch in library.CONFIG_MAPPING or arch.endswith(".json"):
        network = maker.from_config(own_config, **options)
    else:
        options |= {"config": own_config, "local_files_only": True}
        network = maker.from_pretrained(arch, ignore_mismatched_sizes=True, **options)

    # ---- Step 3: as this package calls it.
    for parent in [*network.modules()]:
        for name, layer in parent.named_children():
            if isinstance(layer, library.pytorch_utils.Conv1D):
                setattr(parent, name, _to_linear(layer))
    kind: Any = type(network)
    network.__class__ = _make_class(kind)
    network.has_square_mask = is_encoder and own_config.model_type not in FLAT_MASKED
    return network


def _read_config(library: Any, arch: str, values: Record) -> Any:
    """Return a configuration with some values."""
    if arch in library.CONFIG_MAPPING:
        return library.AutoConfig.for_model(arch, **values)
    try:
        return library.AutoConfig.from_pretrained(arch, local_files_only=True, **values)
    except OSError:
        suggestion = did_you_mean(arch, library.CONFIG_MAPPING)
        raise ValueError(
            f"arch={arch} is no folder of save_pretrained, no config.json and no kind of model such"
            f" as gpt2{suggestion}"
        ) from None


def _to_linear(layer: Any) -> nn.Linear:
    """Return GPT-2's layer, which has its weight transposed, as a linear one."""
    linear = nn.Linear(*layer.weight.shape)
    linear.weight = nn.Parameter(layer.weight.detach().T.contiguous())
    linear.bias = layer.bias
    return linear


@cache
def _make_class(kind: Any) -> Any:
    """Return a class of transformers with a forward from token ids to logits.

    A subclass, so that names of parameters stay those that transformers and peft know.
    """

    def forward(self: Any, ids: Tensor) -> Tensor:
        """Token ids `[batch, length]` to logits."""
        mask = (ids != self.config.pad_token_id).long()
        if self.has_square_mask:
            # Made here: transformers looks whether there is padding, which vmap refuses.
            hidden = 1.0 - mask[:, None, None, :].expand(-1, 1, ids.shape[1], -1).float()
            mask = hidden * torch.finfo(torch.float32).min
        return kind.forward(self, input_ids=ids.long(), attention_mask=mask).logits

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})
