"""The calls of a run for each client and round, as a node expects them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import product

from fedpfl.config.run import Run
from fedpfl.config.schema import Eval
from fedpfl.engine import Backend, FineTuning, Local, RoundSetup, State
from fedpfl.engine.calls import Call, EvalCall, TrainCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.measures import INTERVAL
from fedpfl.engine.round import choose_turns, make_train_call
from fedpfl.ground.records import Record
from fedpfl.ground.tasks import CLASSIFICATION


@dataclass(frozen=True)
class Schedule:
    """List the calls of a run.

    Attributes:
        setup: What its rounds are played with; `local` is as configured.
        rounds: How many it plays.
        evaluation: The keys `eval.*`.
        cohorts: The clients of each round; None where a node cannot know them.
        measures: What evaluations tell beside hits and loss.
    """

    setup: RoundSetup
    rounds: int
    evaluation: Eval
    cohorts: tuple[tuple[int, ...], ...] | None = None
    measures: tuple[str, ...] = ()

    def list_calls(self, state: State, client: int) -> list[Call]:
        """Return all that is asked of a client after `state.round` rounds."""
        return [*self._list_training(state, client), *self._list_evaluations(state, client)]

    def _list_training(self, state: State, client: int) -> list[TrainCall]:
        """Return the client's calls in the next round, a survey's too."""
        if state.round >= self.rounds:
            return []
        cohort = list(range(self.setup.federation.clients))
        if self.cohorts is not None:
            cohort = list(self.cohorts[state.round])
        local = self.setup.local.for_round(state.round + 1, self.rounds)
        setup = replace(self.setup, local=local)
        calls = []
        for turn in choose_turns(setup, state, cohort):
            # With an unknown cohort, turns of it are known by a client alone.
            if client in turn.clients:
                call = make_train_call(setup, state, turn)
                calls.append(replace(call, clients=[client]))
        return calls

    def _list_evaluations(self, state: State, client: int) -> list[EvalCall]:
        """Return the client's evaluations after the last finished round."""
        keys = self.evaluation
        setup = self.setup
        # Early stopping may end the run after any round.
        last_round = state.round if self.stops_early else self.rounds
        is_due = state.round % keys.every == 0 or state.round == last_round
        if not is_due or not 0 < state.round <= self.rounds:
            return []
        tunings: list[FineTuning | None] = [None]
        if keys.finetune_epochs and keys.should_finetune(state.round, last_round):
            draws = Draws(setup.seed, "finetune", state.round)
            tunings.append(keys.plan_tuning(setup.local, draws))
        adaptation = FineTuning(setup.local, Draws(setup.seed, "adapt", state.round))
        # The last evaluation tells an interval, too, of other scores than shares of hits.
        measures = [self.measures]
        if setup.federation.task is not CLASSIFICATION and state.round == last_round:
            plain = measures if state.round < self.rounds else []
            measures = [*plain, (*self.measures, INTERVAL)]
        return [
            EvalCall(
                method=setup.method,
                federation=setup.federation,
                state=state,
                clients=[client],
                tuning=tuning,
                before_evaluation=adaptation,
                measures=names,
            )
            for tuning, names in product(tunings, measures)
        ]

    @property
    def stops_early(self) -> bool:
        """Early stopping makes cohorts depend on clients' losses."""
        return self.setup.stopping is not None and self.setup.stopping.early


def make_schedule(run: Run, backend: Backend) -> Schedule:
    """List the calls of a run by client and round.

    Args:
        run: As a node has built it.
        backend: The node's.
    """
    setup = RoundSetup(
        backend=backend,
        method=run.method,
        federation=run.in_round(1).federation,
        local=run.local,
        seed=run.settings.seed,
        stopping=run.stopping,
    )
    # The server of privacy=client draws cohorts in secret; early stopping changes them.
    cohorts = None
    if run.client_account is None and not run.stopping.early:
        cohorts = tuple(map(tuple, run.draw_cohorts()))
    measures = (*run.settings.metrics, *run.task.measures)
    return Schedule(setup, run.settings.rounds, run.eval, cohorts, measures)


def describe_call(call: Call) -> Record:
    """Describe a call to one client in plain values."""
    if isinstance(call, TrainCall):
        return {
            "local": _describe_local(call.local),
            "draws": _describe_draws(call.draws),
            "stopping": call.wants_stopping_loss,
            "turn": None if call.survey is None else call.survey.trains,
        }
    return {
        "tuning": _describe_tuning(call.tuning),
        "before": _describe_tuning(call.before_evaluation),
        "measures": list(call.measures),
    }


def _describe_tuning(tuning: FineTuning | None) -> Record | None:
    if tuning is None:
        return None
    draws = _describe_draws(tuning.draws)
    return {
        "local": _describe_local(tuning.local),
        "draws": draws,
        "part": tuning.part,
        "stages": [list(stage) for stage in tuning.stages],
    }


def _describe_draws(draws: Draws) -> Record:
    # How samples are protected is each node's affair.
    return {"seed": draws.seed, "purpose": draws.purpose, "round": draws.round}


def _describe_local(local: Local) -> Record:
    # JSON has no tuples: an answer repeats the question, and is compared with it.
    return {**asdict(local), "betas": list(local.betas)}
