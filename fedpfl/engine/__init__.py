"""Turns State into State: local training, merging and evaluation of any Method, on interchangeable
backends.
"""

from fedpfl.engine import measures
from fedpfl.engine.backend import Backend, Engine
from fedpfl.engine.backends.autotune import choose
from fedpfl.engine.backends.selection import check, make, slow
from fedpfl.engine.clock import Clock, timed
from fedpfl.engine.keys import cohorts, impure, secret_cohorts
from fedpfl.engine.masks import compared
from fedpfl.engine.pace import Pace, pace
from fedpfl.engine.protect import clipping, reference
from fedpfl.engine.round import Outcome, play
from fedpfl.engine.state import State, begin, participants
from fedpfl.engine.stopping import Stopping, pick
from fedpfl.engine.store import SPARE, Store
from fedpfl.engine.training.hook_checks import asked, unseen
from fedpfl.engine.training.sgd import Local, Tuning, own_steps

__all__ = [
    "SPARE",
    "Backend",
    "Clock",
    "Engine",
    "Local",
    "Outcome",
    "Pace",
    "State",
    "Stopping",
    "Store",
    "Tuning",
    "asked",
    "begin",
    "check",
    "choose",
    "clipping",
    "cohorts",
    "compared",
    "impure",
    "make",
    "measures",
    "own_steps",
    "pace",
    "participants",
    "pick",
    "play",
    "reference",
    "secret_cohorts",
    "slow",
    "timed",
    "unseen",
]
