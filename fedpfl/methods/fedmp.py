"""FedMP: clients keep the neurons of largest L1 norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.pruned import PrunedSubmodel


@dataclass(frozen=True)
class FedMP(PrunedSubmodel):
    """FedMP (Jiang et al., IEEE TMC 2023): prune once, by neurons' L1 norms."""

    def _scores(self, model: Tree, gradients: Tree) -> Tree:
        """Return |w|: summed over a neuron's weights it is their L1 norm."""
        return tree.map(torch.abs, model)
