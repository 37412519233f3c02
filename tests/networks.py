"""Networks as users write them: what each does beside answering is taken over, or refused in one
line.
"""

import inspect
import random
import re
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

SHAPE = (1, 8, 8)
WIDTH = 12


def inputs(shape):
    return int(np.prod(shape))


class Plain(nn.Module):
    """Two layers: what the others are made of, which add parts."""

    def __init__(self, shape: tuple, classes: int):
        super().__init__()
        self.hidden = nn.Linear(inputs(shape), WIDTH)
        self.out = nn.Linear(WIDTH, classes)
        self.add_parts()

    def add_parts(self):
        pass

    def features(self, x):
        return torch.tanh(self.hidden(x.flatten(1)))

    def forward(self, x):
        return self.out(self.features(x))


# ---- normalisation, and code that looks across a batch


def normalise(norm, shape, classes):
    first, last = nn.Linear(inputs(shape), WIDTH), nn.Linear(WIDTH, classes)
    return nn.Sequential(nn.Flatten(), first, norm, nn.Tanh(), last)


def batchnorm_1d(shape, classes):
    return normalise(nn.BatchNorm1d(WIDTH), shape, classes)


def batchnorm_without_statistics(shape, classes):
    norm = nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False)
    return normalise(norm, shape, classes)


class BatchNormByHand(Plain):
    """Normalises by the batch in its own code."""

    def features(self, x):
        hidden = self.hidden(x.flatten(1))
        return torch.tanh((hidden - hidden.mean(0)) / (hidden.std(0) + 0.1))


class DetachedCentre(Plain):
    """Looks across the batch by values that carry no gradient."""

    def features(self, x):
        hidden = self.hidden(x.flatten(1))
        return torch.tanh(hidden - hidden.detach().mean(0))


# ---- buffers and other state


class CounterInPlace(Plain):
    """A buffer that counts training steps and warms the features up."""

    def add_parts(self):
        self.register_buffer("steps", torch.zeros(()))

    def count(self):
        self.steps += 1

    def features(self, x):
        if self.training:
            self.count()
        return super().features(x) * torch.clamp(self.steps / 5, max=1)


class CounterAssigned(CounterInPlace):
    def count(self):
        self.steps = self.steps + 1


class AverageWithGraph(Plain):
    """A running mean that keeps its graph, as nobody detached it."""

    def add_parts(self):
        self.register_buffer("mean", torch.zeros(WIDTH))

    def features(self, x):
        hidden = self.hidden(x.flatten(1))
        if self.training:
            self.mean = 0.9 * self.mean.detach() + 0.1 * hidden.mean(0)
        return torch.tanh(hidden - self.mean.detach())


class SlowAverage(Plain):
    """A running mean that hardly moves in a step."""

    def add_parts(self):
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x):
        if self.training:
            self.mean = 0.999 * self.mean + 0.001 * x.mean().detach()
        return super().forward(x) * self.mean


class CountsInEvaluation(CounterInPlace):
    """Its counter moves in evaluation too."""

    def features(self, x):
        self.steps += 1
        return Plain.features(self, x) * torch.clamp(self.steps / 5, max=1)


class NotPersistent(Plain):
    """A buffer that is in no state_dict."""

    def add_parts(self):
        self.register_buffer("grid", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def features(self, x):
        return super().features(x) * self.grid


class FrozenAverage(Plain):
    """A parameter without gradient, moved by hand in training."""

    def add_parts(self):
        self.average = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def features(self, x):
        hidden = self.hidden(x.flatten(1))
        if self.training:
            self.average.data.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        return torch.tanh(hidden - self.average)


class QueueInList(Plain):
    """A memory of features in a list, as of contrastive learning."""

    def add_parts(self):
        self.memory = deque(maxlen=3)

    def features(self, x):
        features = super().features(x)
        self.memory.append(features.detach().mean(0))
        return features - torch.stack(list(self.memory)).mean(0)


class GrowingBuffer(Plain):
    def add_parts(self):
        self.register_buffer("seen", torch.zeros(1))

    def features(self, x):
        self.seen = torch.cat([self.seen, self.seen[-1:] + len(x)])
        return super().features(x)


class LateBuffer(Plain):
    def add_parts(self):
        self.register_buffer("mean", None)

    def features(self, x):
        features = super().features(x)
        if self.mean is None:
            self.mean = features.detach().mean(0)
        return features - self.mean


class ClampsWeights(Plain):
    """A constraint on the weights, by hand, in forward."""

    def features(self, x):
        self.hidden.weight.data.clamp_(-0.05, 0.05)
        return super().features(x)


class GeneratorInAttribute(Plain):
    """Draws from a generator of its own."""

    def add_parts(self):
        self.noise = torch.Generator().manual_seed(3)

    def features(self, x):
        features = super().features(x)
        return features + 0.1 * torch.randn(features.shape, generator=self.noise)


class HookByClosure(Plain):
    """Reads features that a hook leaves; the hook means the network it was made in, which copies do
    not change.
    """

    def add_parts(self):
        self.left = torch.zeros(())
        self.hidden.register_forward_hook(
            lambda layer, x, output: setattr(self, "left", output.detach())
        )

    def features(self, x):
        return super().features(x) + self.left.mean()


class HookByMethod(Plain):
    """The same by a bound method, which is copied with the network."""

    def add_parts(self):
        self.left = torch.zeros(())
        self.hidden.register_forward_hook(self.leave)

    def leave(self, layer, x, output):
        self.left = output.detach()

    def features(self, x):
        return super().features(x) + 0.1 * self.left


class LateParameter(Plain):
    def features(self, x):
        features = super().features(x)
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(features.shape[1]))
        return features * self.scale


class ParameterLists(nn.Module):
    """Weights in lists and dictionaries of parameters."""

    def __init__(self, shape, classes):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(0.05 * torch.randn(inputs(shape), WIDTH))])
        self.shifts = nn.ParameterDict({"hidden": nn.Parameter(torch.zeros(WIDTH))})
        self.out = nn.Linear(WIDTH, classes)

    def forward(self, x):
        return self.out(torch.tanh(x.flatten(1) @ self.weights[0] + self.shifts["hidden"]))


class MadeStill(nn.Module):
    """Its BatchNorm was made in evaluation mode, which `train()` of the whole network ends."""

    def __init__(self, shape, classes):
        super().__init__()
        self.hidden, self.norm = nn.Linear(inputs(shape), WIDTH), nn.BatchNorm1d(WIDTH).eval()
        self.out = nn.Linear(WIDTH, classes)

    def forward(self, x):
        return self.out(torch.tanh(self.norm(self.hidden(x.flatten(1)))))


class KeepsBatchNormStill(MadeStill):
    """Holds its BatchNorm in evaluation mode by overriding `train`."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


class TrainsWithoutSelf(Plain):
    """Overrides `train` and forgets what it returns."""

    def train(self, mode=True):
        super().train(mode)


def parallel(shape, classes):
    return nn.DataParallel(Plain(shape, classes))


class GradientHook(Plain):
    """Holds weights still by a hook on their gradient."""

    def add_parts(self):
        self.hidden.weight.register_hook(torch.zeros_like)


class ListedWeights(Plain):
    """Reads a weight from a list of its own."""

    def add_parts(self):
        self.weights = [self.hidden.weight]

    def features(self, x):
        return torch.tanh(x.flatten(1) @ self.weights[0].t())


class Softmaxed(Plain):
    """Answers probabilities, which the loss takes for logits."""

    def forward(self, x):
        return super().forward(x).softmax(-1)


class DrawsAtFirstCall(Plain):
    """Each worker's copy would have numbers of its own."""

    def features(self, x):
        if not hasattr(self, "offset"):
            self.offset = torch.randn(WIDTH)
        return super().features(x) + self.offset


# ---- recomputation


class Checkpointed(Plain):
    def features(self, x):
        hidden = checkpoint(super().features, x, use_reentrant=False)
        # This kind gives `torch.autograd.grad` no gradients.
        return checkpoint(torch.tanh, hidden, use_reentrant=True)


# ---- random layers


class Dropped(Plain):
    def add_parts(self):
        self.drop = nn.Dropout(0.5)

    def features(self, x):
        return self.drop(super().features(x))


class DropoutAlways(Plain):
    """Monte-Carlo dropout: in evaluation too."""

    def features(self, x):
        return nn.functional.dropout(super().features(x), 0.3)


class NoisyByNumpy(Plain):
    def features(self, x):
        features = super().features(x)
        scale = np.random.uniform(0.5, 1.5) * random.uniform(0.9, 1.1)
        return features * scale if self.training else features


# ---- values and layers


class ViewsBatch(Plain):
    """Reads the batch size, as a reshape of no samples cannot."""

    def features(self, x):
        return torch.tanh(self.hidden(x.view(x.size(0), -1)))


class ScaledByBatch(Plain):
    """Divides by the number of samples, in evaluation too."""

    def features(self, x):
        return super().features(x) / len(x)


class Double(Plain):
    """Computes in float64."""

    def add_parts(self):
        self.double()

    def features(self, x):
        return super().features(x.double())


class Recurrent(nn.Module):
    """Rows of an image go through a GRU of torch's."""

    def __init__(self, shape, classes):
        super().__init__()
        self.cells = nn.GRU(shape[-1], WIDTH, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * WIDTH, classes)

    def forward(self, x):
        return self.out(self.cells(x.flatten(1, 2))[0][:, -1])


def lazy(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyLinear(classes))


class NumpyInit(Plain):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        weight = np.random.randn(WIDTH, inputs(shape)) * 0.03
        self.hidden.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float32))


class UnseededInit(Plain):
    """Draws from a generator that nobody can seed."""

    def add_parts(self):
        self.scale = float(np.random.default_rng().uniform(0.2, 3))

    def features(self, x):
        return super().features(x) * self.scale


class Tied(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.first = nn.Linear(inputs(shape), WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.third.weight = self.second.weight
        self.out = nn.Linear(WIDTH, classes)

    def forward(self, x):
        hidden = torch.tanh(self.second(torch.tanh(self.first(x.flatten(1)))))
        return self.out(torch.tanh(self.third(hidden)))


class TiedHead(nn.Module):
    """The head's weight is that of a layer below it."""

    def __init__(self, shape, classes):
        super().__init__()
        self.first = nn.Linear(inputs(shape), classes)
        self.middle = nn.Linear(classes, classes)
        self.out = nn.Linear(classes, classes)
        self.out.weight = self.middle.weight

    def forward(self, x):
        return self.out(torch.tanh(self.middle(torch.tanh(self.first(x.flatten(1))))))


def spectral(shape, classes):
    layer = parametrizations.spectral_norm(nn.Linear(inputs(shape), WIDTH))
    return nn.Sequential(nn.Flatten(), layer, nn.Tanh(), nn.Linear(WIDTH, classes))


def weight_normed(shape, classes):
    head = parametrizations.weight_norm(nn.Linear(WIDTH, classes))
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs(shape), WIDTH), nn.Tanh(), head)


class ChangesInput(Plain):
    def forward(self, x):
        x.add_(1)
        return super().forward(x)


# ---- heads


class AuxiliarySameWidth(Plain):
    """A second head of as many outputs, which nothing comes of."""

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.other = nn.Linear(WIDTH, classes)

    def forward(self, x):
        features = self.features(x)
        self.other(features)
        return self.out(features)


class HeadFirst(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.out, self.hidden = nn.Linear(WIDTH, classes), nn.Linear(inputs(shape), WIDTH)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x.flatten(1))))


class Prior(Plain):
    """Adds a trained offset to the head's logits, zeros at first."""

    def __init__(self, shape, classes, *rest, **options):
        super().__init__(shape, classes, *rest, **options)
        self.prior = nn.Parameter(torch.zeros(classes))

    def forward(self, x):
        return super().forward(x) + self.prior


class Temperature(Plain):
    """Logits by a learned scale, the logarithm of which is a parameter of no axes."""

    def add_parts(self):
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return super().forward(x) * self.temperature.exp()


class CosineHead(Plain):
    """A head that is a linear layer by its class alone."""

    class Cosine(nn.Linear):
        def forward(self, x):
            return 10 * F.linear(F.normalize(x), F.normalize(self.weight))

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.out = self.Cosine(WIDTH, classes, bias=False)


class WideHidden(nn.Module):
    """A hidden layer that has as many outputs as there are classes."""

    def __init__(self, shape, classes):
        super().__init__()
        self.classifier = nn.Linear(inputs(shape), classes)
        self.last = nn.Linear(classes, classes)

    def forward(self, x):
        return self.last(torch.tanh(self.classifier(x.flatten(1))))


class ConvolutionHead(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body, self.out = nn.Conv2d(shape[0], WIDTH, 3, stride=2), nn.Conv2d(WIDTH, classes, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.body(x))).mean((2, 3))


class TwoHeads(AuxiliarySameWidth):
    """An ensemble of two heads: neither is the head."""

    def forward(self, x):
        features = self.features(x)
        return self.out(features) + self.other(features)


class Prototypes(nn.Module):
    """Logits by distances to a parameter outside of a layer."""

    def __init__(self, shape, classes):
        super().__init__()
        self.hidden = nn.Linear(inputs(shape), WIDTH)
        self.prototypes = nn.Parameter(torch.randn(classes, WIDTH))

    def forward(self, x):
        return -torch.cdist(torch.tanh(self.hidden(x.flatten(1))), self.prototypes)


class FrozenBody(Plain):
    """A body without gradients, as of a pretrained network."""

    def add_parts(self):
        self.hidden.requires_grad_(False)

    def features(self, x):
        with torch.no_grad():
            return super().features(x)


class CausalMask(nn.Module):
    """Attention by a buffer of zeros and minus infinities, and positions by a random one."""

    def __init__(self, shape, classes):
        super().__init__()
        self.width = shape[-1]
        tokens = inputs(shape) // self.width
        self.map = nn.Linear(self.width, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, classes)
        self.register_buffer("mask", torch.full((tokens, tokens), -torch.inf).triu(1))
        self.register_buffer("positions", torch.randn(tokens, self.width))

    def forward(self, x):
        tokens = x.reshape(len(x), -1, self.width) + self.positions
        q, k, v = self.map(tokens).chunk(3, -1)
        shares = (q @ k.transpose(1, 2) + self.mask).softmax(-1)
        return self.out((shares @ v).mean(1))


class FillsBuffer(Plain):
    """A tensor of float32 that is filled with what a layer answers."""

    def features(self, x):
        filled = torch.zeros(len(x), WIDTH)
        return filled.index_put((torch.arange(len(x)),), super().features(x))


class StartsLater(Plain):
    """An average that begins with the third call."""

    def add_parts(self):
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(()))

    def move(self, mean):
        self.average = 0.9 * self.average + 0.1 * mean

    def features(self, x):
        if self.training:
            self.calls += 1
            if self.calls > 2:
                self.move(x.mean())
        return super().features(x) + self.average


class StartsLaterByData(StartsLater):
    def move(self, mean):
        self.average.data += 1  # which torch does not count as a change


class WritesItsValue(StartsLater):
    """A buffer that each call in training writes to, but only later ones change."""

    def features(self, x):
        if self.training:
            self.calls += 1
            self.average += 0.1 * (self.calls > 2)
        return Plain.features(self, x) + self.average


# ---- answers


class TupleOutput(Plain):
    def forward(self, x):
        return super().forward(x), x


class SparseEmbedding(Plain):
    """Looks its features up, by a layer whose gradient is sparse."""

    def add_parts(self):
        self.rows = nn.Embedding(2, WIDTH, sparse=True)

    def features(self, x):
        return super().features(x) + self.rows((x.flatten(1)[:, 0] > 0).long())


class NoGradient(Plain):
    def forward(self, x):
        return super().forward(x).detach()


REFUSED = {
    "draws_at_first_call": "training loss of client",
    "queue_in_list": "training loss of client",
    "growing_buffer": "a step changes the form of buffers, main.seen was",
    "late_buffer": "training loss of client",
    "hook_by_closure": "training loss of client",
    "late_parameter": "scale comes, goes or changes its form",
    "clamps_weights": "forward changes hidden.weight, which is trained, by hand",
    "generator_in_attribute": "training loss of client",
    "unseeded_init": "training loss of client",
    "tuple_output": "answers with a tuple; forward must return the logits",
    "sparse_embedding": "its gradients are sparse",
    "no_gradient": "its logits have no gradient",
    "listed_weights": "evaluation of client",
    "gradient_hook": "evaluation of client",
    "parallel": "must be the network itself, without DataParallel",
    "trains_without_self": "its train(mode) does not return self",
}
"""Networks that are refused before the first round, and what the line says of them."""

REFUSED_LATER = ("starts_later", "starts_later_by_data")
"""Networks that are refused while they train."""


def is_network(value):
    """Tell whether this file defines it, to be built for a shape of samples and their classes."""
    if not callable(value) or value.__module__ != __name__:
        return False
    return [*inspect.signature(value).parameters][:2] == ["shape", "classes"]


def name_network(value):
    """Return `parameter_lists` of ParameterLists."""
    return re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", value.__name__).lower()


MODELS = {name_network(value): value for value in [*globals().values()] if is_network(value)}
KEPT = {name: value for name, value in MODELS.items() if name not in (*REFUSED, *REFUSED_LATER)}
"""Networks that run on the loop backend as in plain PyTorch."""
