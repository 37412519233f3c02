"""Clients that train as much of the network as their devices can hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import PositiveProportion
from fedpfl.ground.tree import Agreed
from fedpfl.methods.shared import neurons
from fedpfl.methods.shared.method import Method, Phase, flag
from fedpfl.methods.shared.neurons import Rounding

Assignment = Literal["blocks", "random"]
Widths = tuple[PositiveProportion, ...]

FIVE_WIDTHS = (0.2, 0.4, 0.6, 0.8, 1.0)  # of FedSPU's capability clusters


@dataclass(frozen=True)
class PartialModel(Method, ABC):
    """A client trains the part of the global model that lies between its active neurons.

    A sub-model is kept at full size: inactive entries are zero or frozen, and never move. A
    neuron with zero weights, bias and normalisation gives zero, so this computes the same as the
    small dense network, except under GroupNorm or LayerNorm: their statistics run over
    neurons; where it does, the engine may train the small one. The server averages each entry over
    the clients that trained it; entries without training keep their value. BatchNorm statistics stay with
    the clients, and only those of active neurons move.
    """

    server_sees = "each upload"
    mixes_samples = ""

    @abstractmethod
    def _active(self, server, client):
        """Return the neurons that the client holds, bool `[neurons + 1]`.

        The last one is always active.
        """

    def init(self, params, parts):
        """Give the server the full model and its plan, the client a model."""
        plan = neurons.build_plan(params, parts)
        return {"model": params, "plan": plan}, {"model": params}

    def buffers(self):
        """Keep statistics with the clients."""
        return {"main": "local"}

    def prepare(self, server, client):
        """Add which neurons are active, and which entries lie between them."""
        active = self._active(server, client)
        mask = neurons.entry_masks(server["plan"], active, server["model"])
        return {**client, "active": active, "mask": mask}

    def download(self, server, client):
        """Send the active entries; both sides know where they are."""
        return Agreed(server["model"], client["mask"])

    def phases(self, server, client, params, epochs):
        """Train the active entries alone."""
        return [Phase(epochs, client["mask"])]

    def updated_buffers(self, server, client):
        """Move the statistics of active neurons."""
        return {"main": neurons.statistics_masks(server["plan"], client["active"])}

    def finish(self, server, client, start, params):
        """Upload the active entries, and keep the trained model."""
        upload = {"model": Agreed(params, client["mask"])}
        return upload, {**client, "model": params}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average each entry over the clients that trained it."""
        uploaded = uploads["model"]
        model = tree.masked_mean(
            server["model"],
            uploaded.values,
            uploaded.mask,
            weight,
        )
        return {**server, "model": model}, clients

    def personal(self, server, client):
        """Return the client's last model, or the initial one's part that it can hold."""
        active = self._active(server, client)
        mask = neurons.entry_masks(server["plan"], active, client["model"])
        part = tree.apply_mask(client["model"], mask)
        return self.evaluated(server, client, part)

    def metrics(self, server, client):
        """Return the share of the network's entries that the client trains."""
        masks = tree.leaves(client["mask"])
        trained_count = sum(mask.sum() for mask in masks)
        return {"trained_share": trained_count / sum(mask.numel() for mask in masks)}


@dataclass(frozen=True)
class Submodel(PartialModel, ABC):
    """Clients differ in the share of neurons that they can hold.

    widths: shares of each hidden layer's neurons that devices can hold.
    assign: `blocks`: as many clients of each width, in order; `random`: drawn once, uniformly.
    rounding: of share times neurons; at least one neuron is left.
    """

    widths: Widths = FIVE_WIDTHS
    assign: Assignment = "blocks"
    rounding: Rounding = "floor"

    def __post_init__(self):
        super().__post_init__()
        self.check(len(self.widths) > 0, "widths", "at least one share")

    def init(self, params, parts):
        """Give the client a width too."""
        server, client = super().init(params, parts)
        return server, {"width": (~flag(params)).double(), **client}

    def init_clients(self, clients, generator):
        """Return the clients' widths."""
        return {"width": assign_values(self.widths, self.assign, generator, clients)}


@dataclass(frozen=True)
class RandomSubmodel(Submodel, ABC):
    """The active neurons are drawn at random, anew for every client and round."""

    server_sees = "each upload"

    def sample(self, server, generator):
        """Draw a lot for each neuron."""
        neuron_count = len(server["plan"]["group"])
        return {"lot": torch.rand(neuron_count, generator=generator)}

    def _active(self, server, client):
        """Return the neurons with the highest lots."""
        return neurons.top_neurons(
            server["plan"],
            client["width"],
            client["lot"],
            self.rounding,
        )

    def download(self, server, client):
        """Send the active entries, and a bit per neuron."""
        entries = super().download(server, client)
        return {"model": entries, "active": client["active"][:-1]}

    def start(self, received, client):
        """Return the active entries with zeros around them."""
        return received["model"]

    def personal(self, server, client):
        """Return the client's last trained model; before that, the whole initial one."""
        return client["model"]


def assign_values(
    values: tuple[float, ...], assign: Assignment, generator: Generator, clients: int
) -> Tensor:
    """Return one of `values` for each client, float64 `[clients]`.

    They are as many of each in order (`blocks`), or drawn uniformly (`random`).
    """
    if assign == "random":
        index = torch.randint(len(values), (clients,), generator=generator)
    else:
        index = torch.arange(clients) * len(values) // clients
    return torch.tensor(values, dtype=torch.float64)[index]
