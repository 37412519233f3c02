"""Hermes: clients keep the neurons of largest L2 norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.pruned import PrunedSubmodel


@dataclass(frozen=True)
class Hermes(PrunedSubmodel):
    """Hermes (Li et al., MobiCom 2021): prune once, by neurons' L2 norms."""

    def _scores(self, model: Tree, gradients: Tree) -> Tree:
        """Return w^2: summed over a neuron's weights it ranks as their L2 norm."""
        return tree.map(torch.square, model)
