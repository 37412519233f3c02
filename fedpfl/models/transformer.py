"""A transformer that reads texts: a class of the whole, or the next letter."""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from fedpfl.ground.ranges import AtLeast, Count
from fedpfl.models.attention import Block
from fedpfl.models.shapes import tokens


class Transformer(nn.Module):
    """Embeddings of tokens and places, blocks of attention, and a classifier.

    The classifier reads one vector a text, behind a LayerNorm.

    Ids from `vocabulary` on share the last row.
    pool: mean over the words of a text, in which 0 is padding that takes no part, as in AG News; or
        the `last` token, of texts in which 0 is a letter like any, as in Shakespeare.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        vocabulary: Annotated[int, AtLeast(2)] = 20_000,
        layers: Count = 4,
        heads: Count = 4,
        width: Count = 128,
        pool: Literal["mean", "last"] = "mean",
    ):
        super().__init__()
        if width % heads:
            raise ValueError(f"model.width={width} must be a multiple of model.heads={heads}")
        self.pool = pool
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(tokens(shape), width).normal_(std=0.02))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids `[batch, length]`, of any type, to logits `[batch, classes]`."""
        ids = ids.long().clamp(max=self.embedding.num_embeddings - 1)
        x = self.embedding(ids) + self.position
        real = ids != 0 if self.pool == "mean" else None
        for block in self.blocks:
            x = block(x, real)
        x = self.norm(x)
        if real is None:
            return self.classifier(x.select(-2, -1))
        return self.classifier(
            (x * real.unsqueeze(-1)).sum(-2) / real.sum(-1, keepdim=True).clamp(min=1)
        )
