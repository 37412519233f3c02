"""What one network learns of another's probabilities."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def kl_divergence(teacher: Tensor, student: Tensor, tau: float = 1.0) -> Tensor:
    """Return KL(teacher || student) of logits `[batch, classes]` over tau, `[batch]`."""
    log_teacher = F.log_softmax(teacher / tau, 1)
    log_student = F.log_softmax(student / tau, 1)
    return (log_teacher.exp() * (log_teacher - log_student)).sum(1)
