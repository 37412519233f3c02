"""Methods that train a global model w and a client's private one v on the same batches."""

from collections.abc import Callable
from typing import Any

from fedpfl.methods.shared.method import Phase


def two_model_phases(
    epochs: int,
    personal_epochs: int,
    global_loss: Callable[..., Any],
    personal_loss: Callable[..., Any],
) -> list[Phase]:
    """Return the phases for trees `{"w": ..., "v": ...}`: both, then the longer one alone.

    Args:
        epochs: of the global model w.
        personal_epochs: of the private model v.
        global_loss: the loss where w trains alone.
        personal_loss: the loss where v trains alone. Together they follow `Method.loss`.
    """
    global_alone = max(0, epochs - personal_epochs)
    personal_alone = max(0, personal_epochs - epochs)
    return [
        Phase(min(epochs, personal_epochs)),
        Phase(global_alone, {"w": True, "v": False}, loss=global_loss),
        Phase(personal_alone, {"w": False, "v": True}, loss=personal_loss),
    ]
