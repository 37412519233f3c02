"""Layers that a method has beside the clients' networks, with torch's initial values."""

from __future__ import annotations

import torch

from fedpfl.ground.tree import Tree


def init_linear(inputs: int, outputs: int, generator: torch.Generator) -> Tree:
    """Return `weight` `[outputs, inputs]` and `bias` as torch.nn.Linear draws them."""
    bound = inputs**-0.5
    weight = torch.empty(outputs, inputs).uniform_(-bound, bound, generator=generator)
    bias = torch.empty(outputs).uniform_(-bound, bound, generator=generator)
    return {"weight": weight, "bias": bias}


def seeded_generator(seed: int) -> torch.Generator:
    """Return a generator for such layers.

    Its numbers differ from those that initialise a network of the same seed.
    """
    return torch.Generator().manual_seed((1_000_003 * seed + 1) % 2**63)
