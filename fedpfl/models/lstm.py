"""A network that reads a text letter by letter, as LEAF's (Caldas et al. 2018, arXiv:1812.01097)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.ground.ranges import Count
from fedpfl.models.shapes import tokens


class LSTMLayer(nn.Module):
    """One layer of LSTM that starts from zeros.

    Gates and initial values are torch.nn.LSTM's, but there is one bias.

    torch.func.vmap cannot take nn.LSTM. The rows of a neuron's gates (input, forget, cell, output)
    are neighbours, so that a neuron is a block of rows.
    """

    weight: nn.Parameter
    recurrent: nn.Parameter
    bias: nn.Parameter

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.inputs = inputs
        self.width = width
        bound = width**-0.5
        rows = 4 * width
        shapes = {
            "weight": (rows, inputs),
            "recurrent": (rows, width),
            "bias": (rows,),
        }
        for name, shape in shapes.items():
            values = torch.empty(shape).uniform_(-bound, bound)
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, x: Tensor) -> Tensor:
        """Inputs `[batch, length, inputs]` to the states after each, `[batch, length, width]`."""
        # Gate by gate, once per call: a step then works on four contiguous parts.
        weight = self._by_gate(self.weight)
        recurrent = self._by_gate(self.recurrent)
        bias = self._by_gate(self.bias)
        # From x, so that under vmap there are states for each client.
        hidden = cell = x.new_zeros(*x.shape[:-2], recurrent.shape[-1])
        states = []
        for from_input in F.linear(x, weight, bias).unbind(-2):
            gates = from_input + F.linear(hidden, recurrent)
            entry, forget, new, output = gates.chunk(4, -1)
            cell = forget.sigmoid() * cell + entry.sigmoid() * new.tanh()
            hidden = output.sigmoid() * cell.tanh()
            states.append(hidden)
        return torch.stack(states, -2)

    @staticmethod
    def _by_gate(values: Tensor) -> Tensor:
        """Return rows by gate, where they are by neuron."""
        return values.unflatten(0, (-1, 4)).transpose(0, 1).flatten(0, 1)


class LSTM(nn.Module):
    """Predict the next letter from the last state of two layers of LSTM.

    Letters have embeddings of 8 numbers.

    Ids from `vocabulary` on share the last row; none is padding.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, vocabulary: Count = 80, width: Count = 256
    ):
        super().__init__()
        tokens(shape)
        self.embedding = nn.Embedding(vocabulary, 8)
        self.lstm1 = LSTMLayer(8, width)
        self.lstm2 = LSTMLayer(width, width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids `[batch, length]`, of any type, to logits `[batch, classes]`."""
        ids = ids.long().clamp(max=self.embedding.num_embeddings - 1)
        states = self.lstm2(self.lstm1(self.embedding(ids)))
        return self.classifier(states.select(-2, -1))
