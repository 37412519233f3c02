"""Differential privacy of clients in a federation, and of samples at their client."""

from fedpfl.privacy.accounting import Account
from fedpfl.privacy.mechanism import UpdateNorms, clip_uploads, draw_noise
from fedpfl.privacy.samples import SampleAccount, SampleProtection, Steps
from fedpfl.privacy.secret import Secret
from fedpfl.privacy.settings import PRIVACIES, Guarantee, Privacy, SamplePrivacy

__all__ = [
    "PRIVACIES",
    "Account",
    "Guarantee",
    "Privacy",
    "SampleAccount",
    "SamplePrivacy",
    "SampleProtection",
    "Secret",
    "Steps",
    "UpdateNorms",
    "clip_uploads",
    "draw_noise",
]
