"""Layers that a method has beside the clients' networks, with torch's initial values."""

from __future__ import annotations

import torch

from fedpfl.ground.tree import Tree


def init_linear(inputs: int, outputs: int, generator: torch.Generator) -> Tree:
    """Return a linear map's `weight` `[outputs, inputs]` and `bias`, as torch.nn.Linear draws them."""
    bound = inputs**-0.5
    shapes = {"weight": (outputs, inputs), "bias": (outputs,)}
    return {
        name: torch.empty(shape).uniform_(-bound, bound, generator=generator)
        for name, shape in shapes.items()
    }


def seeded_generator(seed: int) -> torch.Generator:
    """Return a generator for such layers.

    It draws other numbers than the initial values of a network of the same seed.
    """
    return torch.Generator().manual_seed((1_000_003 * seed + 1) % 2**63)
