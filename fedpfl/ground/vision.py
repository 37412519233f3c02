"""Import torchvision, also where its wheel is made for another torch."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

# An operator's schema lives as long as the Library that defined it.
_libraries: list[torch.library.Library] = []


def load_torchvision(part: str = "datasets") -> Any:
    """Import a part of torchvision, `datasets` or `models`."""
    with warnings.catch_warnings():
        # torchvision warns of image libraries that reading data sets does not need.
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(f"torchvision.{part}")
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
            # The plain wheel is a CUDA build: beside a CPU build of torch its operators do not load.
            # These parts need none, so the two missing schemas are declared, and the import repeated.
            library = torch.library.Library("torchvision", "DEF")
            for op in ("nms", "qnms"):
                library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _libraries.append(library)
            return importlib.import_module(f"torchvision.{part}")
