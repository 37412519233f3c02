"""SDFLoRA: a shared low-rank module, stacked and compressed at the server, beside a private one."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import Proportion
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.low_rank import (
    compress_pair,
    list_pairs,
    rank_axis,
    rank_of,
    stack_pairs,
)
from fedpfl.methods.shared.method import Method


@dataclass(frozen=True)
class SDFLoRA(Method):
    """SDFLoRA, selective decoupled LoRA (Shen et al. 2026, arXiv:2601.11219), with `adapter=lora`.

    An adapted layer is y = W0 x + (alpha / r) (B_g A_g x + B_i A_i x), B_g A_g being of rank
    `share` * r and B_i A_i of the rest. A client trains both and sends B_g A_g up; B_i A_i never
    leaves it. The server stacks the uploads, that is sum_k a_k B_k A_k without a cross term, and
    compresses the stack to its former rank by its singular values: B_g = U S, A_g = V'. A client
    that was never sampled has B_i = 0.

    share: of the rank in the shared module; the authors' configuration has 8 of 12. 1 is LoRA for
    all, 0 Local-Only.
    merge: `stacked`, or `averaged`, factor by factor, as the authors' code has it too.
    head: `personal`, as in the authors' configuration, or `averaged`.

    A reconstruction: of the paper its abstracts, summaries and code could be read. How it shares
    the singular values
    out is ours: with all of them in B_g no direction is lost to training where one is 0. The code
    stacks without weights and without compression, its weights are a fixed 0.1 each in place of
    shares of samples, and it weighs each module by a private learned number; its ranks may differ
    by client. The paper's noise on the shared module is not here.
    """

    share: Proportion = 0.667
    merge: Literal["stacked", "averaged"] = "stacked"
    head: Literal["personal", "averaged"] = "personal"

    pairs: ClassVar[int] = 1

    @property
    def server_sees(self) -> str:  # type: ignore[override]
        """Return each upload if the server stacks pairs, or a mean if it averages them."""
        return "each upload" if self.merge == "stacked" else "mean of uploads"

    def init(self, params, parts):
        """Cut each pair along its rank."""
        private_names = parts.head if self.head == "personal" else ()
        shared, private = self._cut(params, private_names)
        return shared, {"own": private}

    def _cut(self, params: Tree, private_names: Collection[str]) -> tuple[Tree, Tree]:
        """Return the shared and the private entries of a network."""
        shared = dict[str, Tensor]()
        private = dict[str, Tensor]()
        for name, leaf in params.items():
            if name.endswith((".lora_A", ".lora_B")):
                axis = rank_axis(name, leaf)
                rank = leaf.shape[axis]
                shared_rank = round(self.share * rank)
                shared_piece, private_piece = leaf.split([shared_rank, rank - shared_rank], axis)
                if shared_rank:
                    shared[name] = shared_piece
                if shared_rank < rank:
                    private[name] = private_piece
            elif name in private_names:
                private[name] = leaf
            else:
                shared[name] = leaf
        return shared, private

    def start(self, received, client):
        """Return both modules side by side."""
        private = client["own"]
        both_modules = {}
        for name in received.keys() & private.keys():
            pieces = (received[name], private[name])
            both_modules[name] = torch.cat(pieces, rank_axis(name, private[name]))
        return {**received, **private, **both_modules}

    def finish(self, server, client, start, params):
        """Send the shared module up, keep the private one."""
        shared, private = self._cut(params, client["own"])
        return shared, {"own": private}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average, but for low-rank pairs: stack and compress these."""
        merged = tree.mean(uploads, weight)
        if self.merge == "averaged":
            return merged, clients
        for name_a, name_b in list_pairs(merged).values():
            # Where training diverged, as the mean tells, there are no factors of the product.
            if not (uploads[name_a].isfinite().all() and uploads[name_b].isfinite().all()):
                continue
            # ---- Stack: sum_k a_k B_k A_k as one pair of a high rank.
            a, b = stack_pairs(uploads[name_a], uploads[name_b], weight)
            # ---- Compress the stack to its former rank.
            a, b = compress_pair(a, b, rank_of(name_b, server[name_b]))
            merged[name_a] = a.reshape(server[name_a].shape)
            merged[name_b] = b.reshape(server[name_b].shape)
        return merged, clients
