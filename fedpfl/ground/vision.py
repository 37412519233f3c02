"""torchvision, where its wheel is made for another torch."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

_schemas: list[
    torch.library.Library
] = []  # an op schema lives as long as the Library that defined it


def load_torchvision(part: str = "datasets") -> Any:
    """Return a part of torchvision, `datasets` or `models`, imported when first needed.

    The plain wheel is a CUDA build: beside a CPU build of torch its ops do not load and the import
    fails. These parts need none of them, so the two missing schemas are declared and the import
    repeated.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(f"torchvision.{part}")
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
            schemas = torch.library.Library("torchvision", "DEF")
            for op in ("nms", "qnms"):
                schemas.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _schemas.append(schemas)
            return importlib.import_module(f"torchvision.{part}")
