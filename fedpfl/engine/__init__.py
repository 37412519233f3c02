"""Turns State into State: local training, merging and evaluation of any Method, on interchangeable backends."""

from fedpfl.engine.backend import Backend, Engine, Participation, Tally
from fedpfl.engine.evaluate import accuracies
from fedpfl.engine.keys import cohorts
from fedpfl.engine.round import Outcome, State, begin, pick, play
from fedpfl.engine.select import check, make, slow
from fedpfl.engine.sgd import Local, Tuning
from fedpfl.engine.store import Store

__all__ = [
    "Backend",
    "Engine",
    "Local",
    "Outcome",
    "Participation",
    "State",
    "Store",
    "Tally",
    "Tuning",
    "accuracies",
    "begin",
    "check",
    "cohorts",
    "make",
    "pick",
    "play",
    "slow",
]
