"""PruneFL: clients keep the neurons of largest gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.pruned import Pruned


@dataclass(frozen=True)
class PruneFL(Pruned):
    """PruneFL (Jiang et al., IEEE TNNLS 2022, arXiv:1909.12326), pruned once by the L2 norms of the gradients, added up
    over the ranking epochs, of filters and rows.
    """

    def __post_init__(self):
        super().__post_init__()
        self.check(self.ranking_epochs > 0, "ranking_epochs", "1 or more to have gradients")

    def _scores(self, model: Tree, gradients: Tree) -> Tree:
        return tree.map(torch.square, gradients)
