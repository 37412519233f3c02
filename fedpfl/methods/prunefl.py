"""PruneFL: clients keep the neurons of largest gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import Count
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.pruned import PrunedSubmodel


@dataclass(frozen=True)
class PruneFL(PrunedSubmodel):
    """PruneFL (Jiang et al., IEEE TNNLS 2022, arXiv:1909.12326), pruned once by gradients.

    Neurons are ranked by the L2 norms of the gradients, added up over the ranking epochs, of
    filters and rows.
    """

    ranking_epochs: Count = 1  # none would have no gradients

    def _scores(self, model: Tree, gradients: Tree) -> Tree:
        """Return g^2: summed over a neuron's weights it ranks as their L2 norm."""
        return tree.map(torch.square, gradients)
