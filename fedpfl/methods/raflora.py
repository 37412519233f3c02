"""raFLoRA: each place of the rank is averaged over the clients that have it, then as FlexLoRA."""

from dataclasses import dataclass

import torch

from fedpfl.methods.flexlora import FlexLoRA


@dataclass(frozen=True)
class RaFLoRA(FlexLoRA):
    """raFLoRA (Wu et al. 2026, arXiv:2602.13486), with `adapter=lora`.

    As FlexLoRA, but column j of B_k and row j of A_k count by the share that client k has of the
    samples of those clients that are of rank j or more, so that high ranks are not diluted by the
    clients without them:

        sum_j sum_{k: r_k >= j} (n_k / N_j) B_k[:, j] A_k[j, :],    N_j = sum_{k: r_k >= j} n_k.

    Places that no client of the cohort has add nothing.

    A reconstruction: of the paper its abstract and a reimplementation of its Algorithm 1 could be
    read, which gives all singular values to both factors alike; here they are in B, as in
    FlexLoRA.
    """

    def _shares(self, held, weight):
        """Return each client's share at each place of the rank."""
        axis = held.dim() - 1 if held.dim() == 4 else 2
        has_place = held.movedim(axis, 1).flatten(2)[..., 0]
        shares = weight.double().unsqueeze(1) * has_place
        # Shares of all clients count as 1 exactly, although their sum is rounded.
        total = torch.where(has_place.all(0), 1.0, shares.sum(0))
        return torch.where(has_place, shares / total, 0.0)
