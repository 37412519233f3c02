"""A classifier for texts (after Joulin et al., Bag of Tricks for Efficient Text Classification,
EACL 2017).
"""

from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.ground.ranges import AtLeast, Count
from fedpfl.models.shapes import tokens


class Text(nn.Module):
    """Mean of the words' embeddings, fc, ReLU, classifier; embeddings and fc are `width` wide.

    641,188 scalars for 4 classes as a default, however long the texts are. Ids count from 1 and 0
    is padding, which takes no part. Ids from `vocabulary` on share the last row, so that a smaller
    vocabulary makes rare words one word where ids are sorted by frequency.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        vocabulary: Annotated[int, AtLeast(2)] = 20_000,  # padding and words
        width: Count = 32,
    ):
        super().__init__()
        tokens(shape)
        self.embedding = nn.Embedding(vocabulary, width)
        self.fc = nn.Linear(width, width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids `[batch, length]`, of any type, to logits `[batch, classes]`."""
        ids = ids.long().clamp(max=self.embedding.num_embeddings - 1)
        # A text without words has a mean of zeros.
        is_word = (ids != 0).unsqueeze(-1)
        mean = (self.embedding(ids) * is_word).sum(-2) / is_word.sum(-2).clamp(min=1)
        return self.classifier(F.relu(self.fc(mean)))
