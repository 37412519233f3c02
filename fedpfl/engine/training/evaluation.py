"""Models on their clients' samples: one client's alone, or those of many in one forward pass.

A client's counts are the same either way, bit for bit on a CPU. Products of few rows, and the last
rows of larger ones, round in another way, so all have a multiple of `ROW_BLOCK` rows; where that is
not enough, `has_equal_rows` says so. A network for which other samples of a pass matter sees each
client's alone, as they are.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.calls import Counts
from fedpfl.engine.measures import compute_measures
from fedpfl.engine.training.cutting import bind_for_evaluation
from fedpfl.engine.training.features import ClientSplit
from fedpfl.engine.training.jobs import Autocast, EvalJob
from fedpfl.engine.training.shard import gather_data
from fedpfl.engine.training.shortcuts import Shortcuts
from fedpfl.ground import tree
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import LONGEST_CHUNK, Batch, Data
from fedpfl.models import Net

ROW_BLOCK = 16
"""Rows that matrix products with AVX-512 take together."""


class Model(NamedTuple):
    """Hold a model to evaluate: its tree, and its buffers by role."""

    params: Tree
    buffers: Entries


class ForwardPass(NamedTuple):
    """Name the samples that go through a model together: all those of some clients.

    Attributes:
        federation: Has the samples.
        split: Of the federation.
        clients: Several only where a single pass takes all their samples.
        metrics: Names of measures, as in EvalCall.
    """

    federation: Federation
    split: str
    clients: list[int]
    metrics: tuple[str, ...]

    @property
    def client_splits(self) -> list[ClientSplit]:
        """Return each client's split."""
        return [ClientSplit(self.federation, self.split, client) for client in self.clients]

    @property
    def samples(self) -> list[Tensor]:
        """Return the indices of each client's samples."""
        indices_by_client = getattr(self.federation, self.split)
        return [indices_by_client[client] for client in self.clients]

    @property
    def client_sizes(self) -> list[int]:
        """Return the number of samples of each client."""
        # `len` of a tensor takes five times as long, which counts where clients are thousands.
        return [indices.numel() for indices in self.samples]


def evaluate_client(
    net: Net, job: EvalJob, autocast: Autocast, shortcuts: Shortcuts | None = None
) -> Counts:
    """Evaluate one client's model, batch by batch.

    Args:
        net: The network.
        job: The client, its model and its samples.
        autocast: The context of forward passes.
        shortcuts: None computes the model in full.
    """
    # ---- Step 1: the samples, in whole blocks where the network alone sees them
    ((federation, client),) = job.rows
    (random,) = job.random()
    indices = getattr(federation, job.split)[client]
    count = len(indices)
    if not job.has_own_predict and not net.traits.crosses_samples:
        indices = with_full_blocks(indices)
        random = random.new_empty(len(indices), 0)
    data = gather_data(federation, indices)
    device = data.y.device
    bound = net.bind(job.buffers)
    if shortcuts:
        bound = bind_for_evaluation(net, job.params, job.buffers)
    store = shortcuts and shortcuts.feature_store
    excluded_classes = federation.excluded_classes

    # ---- Step 2: hits and losses, batch by batch
    correct = torch.zeros((), dtype=torch.int64, device=device)
    loss = torch.zeros((), device=device)
    logits_of_batches: list[Tensor] = []
    start = 0
    with torch.no_grad(), autocast():
        split = ClientSplit(federation, job.split, client)
        body = store and store.find_body(net, [split], data)
        for batch in data.chunks(random=tree.send(random, device)):
            batch_bound = body.bind_batch(bound, batch) if body else bound
            logits = job.method.predict(batch_bound, job.params, batch.without_labels())
            # The last block is filled with samples that do not count.
            logits = logits[: count - start]
            labels = batch._replace(y=batch.y[: count - start])
            start += len(logits)
            allowed_logits = logits
            if excluded_classes is not None:
                allowed_logits = logits.masked_fill(excluded_classes[client], -torch.inf)
            correct += labels.find_hits(allowed_logits).sum()
            loss += labels.summed_loss(logits)
            if job.metrics:
                logits_of_batches.append(allowed_logits)

    # ---- Step 3: measures beside them
    measures: dict[str, Tensor] = {}
    if logits_of_batches:
        logits = torch.cat(logits_of_batches)
        measures = compute_measures(job.metrics, logits, data.y[:count], job.horizon)
    total = torch.tensor(federation.count_labels(indices[:count]), device=device)
    return Counts(correct=correct, loss=loss, total=total, measures=measures)


def evaluate_clients(
    net: Net,
    model: Model,
    forward_pass: ForwardPass,
    autocast: Autocast,
    shortcuts: Shortcuts,
) -> Counts:
    """Evaluate the network with one model on the samples of several clients.

    Args:
        net: The network.
        model: The clients' one.
        forward_pass: Their samples.
        autocast: The context of the forward pass.
        shortcuts: Save time.

    Returns:
        Counts `[clients]`.
    """
    # ---- Step 1: the logits of all samples
    federation = forward_pass.federation
    sizes = forward_pass.client_sizes
    indices = torch.cat(forward_pass.samples)
    data = gather_data(federation, with_full_blocks(indices))
    store = shortcuts.feature_store
    with torch.no_grad(), autocast():
        bound = bind_for_evaluation(net, model.params, model.buffers)
        body = store and store.find_body(net, forward_pass.client_splits, data)
        if body:
            everything = Batch(data.x, data.y, indices=torch.arange(len(data.x)))
            bound = body.bind_batch(bound, everything)
        logits = bound(model.params, data.x)[: len(indices)]
    data = Data(data.x[: len(indices)], data.y[: len(indices)])

    # ---- Step 2: hits and losses by client
    device = logits.device
    total = tree.send(torch.tensor([*map(federation.count_labels, forward_pass.samples)]), device)
    allowed_logits = logits
    if federation.excluded_classes is not None:
        excluded_classes = federation.excluded_classes[forward_pass.clients]
        excluded_classes = excluded_classes.repeat_interleave(total, 0)
        allowed_logits = logits.masked_fill(excluded_classes, -torch.inf)
    hits = Batch(data.x, data.y).find_hits(allowed_logits)
    correct = torch.stack([client_hits.sum() for client_hits in hits.split(sizes)])
    # As for a client alone.
    losses = []
    samples = zip(data.x.split(sizes), data.y.split(sizes), logits.split(sizes), strict=True)
    for x, y, outputs in samples:
        losses.append(Batch(x, y).summed_loss(outputs))

    # ---- Step 3: measures of each client
    measures: dict[str, Tensor] = {}
    if forward_pass.metrics:
        parts = zip(allowed_logits.split(sizes), data.y.split(sizes), strict=True)
        measures = tree.stack(
            [compute_measures(forward_pass.metrics, outputs, y) for outputs, y in parts]
        )
    return Counts(correct=correct, loss=torch.stack(losses), total=total, measures=measures)


def with_full_blocks(indices: Tensor) -> Tensor:
    """Return indices of samples, the last one repeated until they fill blocks of `ROW_BLOCK`."""
    missing = -len(indices) % ROW_BLOCK
    if not missing:
        return indices
    return torch.cat([indices, indices[-1:].expand(missing)])


def has_equal_rows(net: Net) -> bool:
    """Check whether a sample's outputs on this CPU depend on its neighbours.

    Their last bits are not where MKL multiplies without AVX-512.
    """
    weights = [leaf for leaf in net.module.parameters() if leaf.dim() == 2]
    return all(_multiplies_rows_alike(min(len(leaf), 512), leaf.shape[1]) for leaf in weights)


@cache
def _multiplies_rows_alike(outputs: int, inputs: int) -> bool:
    """Check whether a row of a product is the same beside any rows.

    Args:
        outputs: Rows of the weight.
        inputs: Its columns.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LONGEST_CHUNK, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    product = F.linear(x, weight)
    return all(
        torch.equal(F.linear(x[start:], weight), product[start:])
        for start in range(ROW_BLOCK, LONGEST_CHUNK, ROW_BLOCK)
    )
