"""SDFLoRA: a shared low-rank module, stacked over clients and compressed again, beside a private
one.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import Between
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.method import Method

RANK = {("A", 3): 1, ("B", 3): 2, ("A", 4): 0, ("B", 4): 1}
"""The axis of the rank, by factor and dimensions: 4 are a convolution's."""


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

    share: Annotated[float, Between(0, 1)] = 0.667
    merge: Literal["stacked", "averaged"] = "stacked"
    head: Literal["personal", "averaged"] = "personal"

    pairs: ClassVar[int] = 1

    @property
    def server_sees(self) -> str:  # type: ignore[override]
        """Return what its server looks at: at products of each client's pairs."""
        return "each upload" if self.merge == "stacked" else "mean of uploads"

    def init(self, params, parts):
        """Cut each pair along its rank."""
        shared, own = self._cut(params, parts.head if self.head == "personal" else ())
        return shared, {"own": own}

    def _cut(self, params: Tree, private: Collection[str]) -> tuple[Tree, Tree]:
        """Return what is shared of a network, and what is not."""
        shared, own = dict[str, Tensor](), dict[str, Tensor]()
        for name, leaf in params.items():
            if name.endswith((".lora_A", ".lora_B")):
                axis = RANK[name[-1], leaf.dim()]
                count = round(self.share * leaf.shape[axis])
                pieces = leaf.split([count, leaf.shape[axis] - count], axis)
                for place, piece in zip((shared, own), pieces, strict=True):
                    if piece.shape[axis]:
                        place[name] = piece
            else:
                (own if name in private else shared)[name] = leaf
        return shared, own

    def start(self, received, client):
        """Return both modules side by side."""
        own = client["own"]
        both = {name: (received[name], own[name]) for name in received if name in own}
        joined = {
            name: torch.cat(pieces, RANK[name[-1], pieces[0].dim()])
            for name, pieces in both.items()
        }
        return {**received, **own, **joined}

    def finish(self, server, client, start, params):
        """Send the shared module up, keep the private one."""
        shared, own = self._cut(params, client["own"])
        return shared, {"own": own}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average, but for low-rank pairs: stack and compress these."""
        merged = tree.mean(uploads, weight)
        for name in [
            name for name in merged if name.endswith(".lora_A") and self.merge == "stacked"
        ]:
            other = f"{name[:-1]}B"
            if not (uploads[name].isfinite().all() and uploads[other].isfinite().all()):
                # Training diverged, as the mean tells; a product that is not finite has no factors
                continue
            a, b = stack_pairs(uploads[name], uploads[other], weight)
            a, b = compress_pair(a, b, server[other].shape[RANK["B", server[other].dim()]])
            merged |= {name: a.reshape(server[name].shape), other: b.reshape(server[other].shape)}
        return merged, clients


def stack_pairs(a: Tensor, b: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Join pairs of several clients to one whose product is the weighted sum of theirs, float64.

    a: `[clients, chosen, rank, inputs]`, b: `[clients, chosen, rows, rank]`, or a convolution's.
    """
    if a.dim() == 5:
        a, b = a.flatten(2).unsqueeze(1), b.flatten(2).unsqueeze(1)
    scaled = b.double() * weight.double().view(-1, 1, 1, 1)
    return a.double().movedim(0, 1).flatten(1, 2), scaled.permute(1, 2, 0, 3).flatten(2)


def compress_pair(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return factors of the nearest matrix of a rank to b a, float32: orthonormal rows, and the
    rest.
    """
    (q, left), (p, right) = torch.linalg.qr(b), torch.linalg.qr(a.mT)
    u, s, v = torch.linalg.svd(left @ right.mT, full_matrices=False)
    a, b = v[..., :rank, :] @ p.mT, q @ (u * s.unsqueeze(-2))[..., :rank]
    sign = a.gather(
        -1, a.abs().argmax(-1, keepdim=True)
    ).sign()  # which an algorithm may choose as it likes
    return (a * sign).float(), (b * sign.mT).float()
