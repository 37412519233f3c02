"""Differential privacy of clients: what an update may do at most, and what a run gives away."""

from fedpfl.privacy.accounting import Account
from fedpfl.privacy.mechanism import UpdateNorms, clip_uploads, draw_noise
from fedpfl.privacy.secret import Secret
from fedpfl.privacy.settings import PRIVACIES, Privacy

__all__ = ["PRIVACIES", "Account", "Privacy", "Secret", "UpdateNorms", "clip_uploads", "draw_noise"]
