"""What saves the loop backend time without changing a number: `engine.shortcuts`.

Scripts repeat steps, sub-models train and are evaluated at their true size (`cutting.py`), features
of a frozen body are computed once, and clients that have one model are evaluated together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedpfl.engine.training.features import FeatureStore, make_feature_store
from fedpfl.engine.training.scripts import StepScripts
from fedpfl.models import Net


@dataclass(frozen=True)
class Shortcuts:
    """Hold the memory of shortcuts between calls.

    Attributes:
        scripts: Repeat frequent steps; None where Python keeps up.
        feature_store: Keeps the features of a body that is frozen for good.
    """

    scripts: StepScripts | None = None
    feature_store: FeatureStore | None = None


def make_shortcuts(net: Net, device: torch.device, precision: str) -> Shortcuts:
    """Make the shortcuts of a network on a device."""
    # On a GPU Python is ahead of the kernels; autocast is a state of a thread.
    has_scripts = device.type == "cpu" and precision == "fp32"
    return Shortcuts(StepScripts() if has_scripts else None, make_feature_store(net, device))
