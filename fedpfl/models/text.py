"""A classifier for texts (after Joulin et al., Bag of Tricks for Efficient Text Classification, EACL 2017)."""

import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.models.shapes import tokens


class Text(nn.Module):
    """Mean of the words' embeddings, fc, ReLU, classifier; embeddings and fc are `width` wide.

    Ids count from 1 and 0 is padding, which takes no part. Ids from `vocabulary` on share the last row, so that a
    smaller vocabulary makes rare words one word where ids are sorted by frequency.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, vocabulary: int, width: int):
        super().__init__()
        tokens(shape)
        if vocabulary < 2:
            raise ValueError(f"vocabulary must be 2 or more, padding and words, got {vocabulary}")
        if width < 1:
            raise ValueError(f"width must be 1 or more, got {width}")
        self.embedding = nn.Embedding(vocabulary, width)
        self.fc = nn.Linear(width, width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids `[batch, length]`, of any type, to logits `[batch, classes]`."""
        ids = ids.long().clamp(max=self.embedding.num_embeddings - 1)
        words = (ids != 0).unsqueeze(-1)
        mean = (self.embedding(ids) * words).sum(-2) / words.sum(-2).clamp(min=1)
        return self.classifier(F.relu(self.fc(mean)))


def text(shape: tuple[int, ...], classes: int, vocabulary: int = 20_000, width: int = 32) -> Text:
    """Build `Text`: 641,188 scalars for 4 classes, however long the texts are."""
    return Text(shape, classes, vocabulary, width)
