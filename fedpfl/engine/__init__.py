"""Turns State into State: local training, merging and evaluation of any Method.

The room knows methods by their hooks, and networks by their traits; it knows no files but those of
a store, no configuration, no report. `play_round` is where to begin reading.
"""

from fedpfl.engine import measures
from fedpfl.engine.backends.backend import Backend, Engine
from fedpfl.engine.backends.selection import (
    FallbackBackend,
    choose_backend,
    make_backend,
    require_supported,
    slowness_notices,
)
from fedpfl.engine.clock import Clock, play_timed_round
from fedpfl.engine.hostile import check_upload_form
from fedpfl.engine.keys import draw_cohorts, draw_secret_cohorts, find_global_draws
from fedpfl.engine.masks import compare_masks
from fedpfl.engine.protect import make_privacy_state, untrained_upload
from fedpfl.engine.round import Outcome, RoundSetup, play_round
from fedpfl.engine.sampling import ClientSteps, SamplingRehearsal
from fedpfl.engine.state import State, make_initial_state
from fedpfl.engine.stopping import Stopping, pick_cohort
from fedpfl.engine.store import SPARE, Store
from fedpfl.engine.training.local import Local, unused_optimizer_text
from fedpfl.engine.training.train_plan import FineTuning
from fedpfl.engine.training.vectorize import vmap_advice

__all__ = [
    "SPARE",
    "Backend",
    "ClientSteps",
    "Clock",
    "Engine",
    "FallbackBackend",
    "FineTuning",
    "Local",
    "Outcome",
    "RoundSetup",
    "SamplingRehearsal",
    "State",
    "Stopping",
    "Store",
    "check_upload_form",
    "choose_backend",
    "compare_masks",
    "draw_cohorts",
    "draw_secret_cohorts",
    "find_global_draws",
    "make_backend",
    "make_initial_state",
    "make_privacy_state",
    "measures",
    "pick_cohort",
    "play_round",
    "play_timed_round",
    "require_supported",
    "slowness_notices",
    "untrained_upload",
    "unused_optimizer_text",
    "vmap_advice",
]
