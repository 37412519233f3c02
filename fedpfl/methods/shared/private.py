"""The family of methods that train a global model w and a client's private one v on the same
batches.
"""

from collections.abc import Callable
from typing import Any

from fedpfl.methods.shared.method import Phase


def two_model_phases(
    epochs: int, own: int, global_loss: Callable[..., Any], personal_loss: Callable[..., Any]
) -> list[Phase]:
    """Return the phases for trees `{"w": ..., "v": ...}`: both together, then the one with more
    epochs alone.

    epochs: of w, own: of v. Together they follow `Method.loss`.
    """
    return [
        Phase(min(epochs, own)),
        Phase(max(0, epochs - own), {"w": True, "v": False}, loss=global_loss),
        Phase(max(0, own - epochs), {"w": False, "v": True}, loss=personal_loss),
    ]
