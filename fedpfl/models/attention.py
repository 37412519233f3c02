"""Multi-head self-attention by matrix products alone, which torch.func.vmap takes as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al., NeurIPS 2017).

    Queries, keys and values come from one linear map.

    PyTorch's fused kernels have no rule for vmap and would be called client by client;
    Initial values are those of nn.MultiheadAttention, which uses them too.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.qkv.weight)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        """Attend from each of `[batch, length, width]` to all tokens.

        Args:
            x: Inputs `[batch, length, width]`.
            is_token: False for padding, bool `[batch, length]`; None: no padding.
        """
        # ---- Each `[batch, heads, length, width of a head]`.
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)

        # ---- softmax(q k^T / sqrt(d)) v
        scores = query @ key.mT * key.shape[-1] ** -0.5
        if is_token is not None:
            # Not -inf: a text of padding alone would have nan for its softmax.
            lowest = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(~is_token[:, None, None], lowest)
        heads = scores.softmax(-1) @ value
        return self.proj(heads.transpose(1, 2).flatten(-2))


class ForTorchvision(Attention):
    """Stand where torchvision's blocks have nn.MultiheadAttention."""

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, **ignored: Any
    ) -> tuple[Tensor, None]:
        """Attend as `Attention` does; the three are one."""
        return super().forward(query), None


class Block(nn.Module):
    """Attention and a layer of GELU neurons, in pre-norm residual form.

    Each is behind a LayerNorm and beside the residual stream.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        """Map `[batch, length, width]` to the same; padding is as in Attention."""
        x = x + self.attention(self.norm1(x), is_token)
        return x + self.mlp(self.norm2(x))
