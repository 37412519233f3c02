"""The account of a node's samples: each planned question is answered once, with noise.

A server may ask for a round again, or begin the run anew with other sites. The node keeps a key and a
ledger of its answers beside the clients' states, and decides by these.
"""

from __future__ import annotations

import csv
import hashlib
import io
import secrets
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from fedpfl import __version__
from fedpfl.config.plan import Plan
from fedpfl.config.run import Run
from fedpfl.data import fingerprint
from fedpfl.engine.calls import Call, TrainCall
from fedpfl.ground import files
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.lock import open_alone
from fedpfl.ground.records import Record
from fedpfl.privacy import SampleAccount, SamplePrivacy, SampleProtection
from fedpfl.runner.resume import digest_code, make_secret

KEY_FILE = "privacy.key"
KEY_BYTES = 32
LEDGER_FILE = "privacy.csv"
LOCK_FILE = "privacy.lock"
TRAINING = "training"
SURVEY = "survey"
TUNING = "fine-tuning"
EVALUATION = "evaluation"


def make_plan_key(plan: Plan) -> dict[str, str]:
    """Return what server and nodes must have in common before samples are known."""
    return {
        "configuration": f"{plan.identity}-seed{plan.settings.seed}",
        "version": f"{__version__}-{fingerprint(digest_code(plan))[:8]}",
    }


def make_run_key(run: Run) -> dict[str, str]:
    """Return the key of a run."""
    configuration, version = make_plan_key(run).values()
    return {"configuration": configuration, "data": run.fingerprint, "version": version}


class Spending(BaseModel):
    """A line of a client's ledger.

    Attributes:
        kind: TRAINING, SURVEY, TUNING or EVALUATION.
        round: Its number; of an evaluation, the last finished one.
        question: A digest of the message and the client's state.
        epsilon: The sum over all answers so far.
    """

    model_config = ConfigDict(extra="forbid")

    kind: str
    round: int
    question: str
    epsilon: float


class SampleBudget:
    """Answer for the samples of a node's clients, by a key and ledgers.

    Args:
        run: As the node has built it.
        account: Of the run.
        folder: Where key and ledgers lie, beside the states of this run's clients.
        limit: The most epsilon of all runs with folders beside it; None: any.
    """

    def __init__(self, run: Run, account: SampleAccount, folder: Path, limit: float | None):
        self._run = run
        self._account = account
        self._folder = folder
        self._limit = limit

    def protect_call(self, call: Call, client: int, question: str) -> Call:
        """Return a planned call with the node's noise, once it is in the ledger.

        Args:
            call: A call of the node's schedule, about one client.
            client: Its number.
            question: A digest of the message and the client's state.

        Raises:
            FedpflError: Another question was answered in its place, or the site allows no more.
        """
        # ---- Step 1: the ledger. A process may live for one message, so all share a lock.
        privacy = self._account.privacy
        kind, round_number = _describe_kind(call)
        with open_alone(self._folder.parent / LOCK_FILE):
            secret = make_secret(self._run, self._read_key)
            self._enter_question(client, kind, round_number, question)

        # ---- Step 2: the noise. Even after the loss of a ledger none is used for two questions;
        # that of a seed is no secret, and as in the simulation.
        if privacy.seed is None:
            secret = secret.bind_to(question)
        # Of the call's client; to calibrate that of all would take a while in each process.
        noises = [self._account.client_noise(client)] * len(self._account.sizes)
        protection = SampleProtection(privacy.clip_length, noises, secret)
        if isinstance(call, TrainCall):
            return replace(call, draws=replace(call.draws, protection=protection))
        changes: Record = {}
        for name in ("tuning", "before_evaluation"):
            tuning = getattr(call, name)
            if tuning:
                draws = replace(tuning.draws, protection=protection)
                changes[name] = tuning._replace(draws=draws)
        return replace(call, **changes)

    # ---- The ledger

    def _enter_question(self, client: int, kind: str, round_number: int, question: str) -> None:
        """Enter a question into a client's ledger, unless it stands there.

        Raises:
            FedpflError: A different one was answered in its place, or the site allows no more.
        """
        # ---- Step 1: the same question costs nothing, and a different one has no noise.
        path = self._folder / f"client{client}" / LEDGER_FILE
        entries = read_ledger(path)
        for earlier in entries:
            if (earlier.kind, earlier.round) == (kind, round_number):
                if earlier.question == question:
                    return
                raise FedpflError(
                    f"its samples have answered for {kind} of round {round_number} already, about"
                    " another model, and privacy=sample answers once; begin a run of another seed,"
                    " which gives away as much again"
                )
        self._require_other_runs(client)

        # ---- Step 2: the price. It is on the disk before an answer leaves.
        kinds = [*(earlier.kind for earlier in entries), kind]
        steps = self._account.sum_steps(client, kinds.count(TRAINING), kinds.count(TUNING))
        epsilon = self._account.price_steps(client, steps)
        entry = Spending(kind=kind, round=round_number, question=question, epsilon=epsilon)
        lines = [",".join(Spending.model_fields)]
        for row in (*entries, entry):
            lines.append(f"{row.kind},{row.round},{row.question},{row.epsilon:.6g}")
        files.write_private(path, "\n".join([*lines, ""]).encode())

    def _require_other_runs(self, client: int) -> None:
        """Raise FedpflError for what ledgers of other runs do not allow."""
        # ---- Step 1: one set of sites and data for each configuration and seed: a server that
        # changes another site's size would get a fresh account.
        configuration = make_plan_key(self._run)["configuration"]
        spent_by_run: dict[str, float] = {}
        for path in self._folder.parent.glob(f"*/client*/{LEDGER_FILE}"):
            run_name = path.parent.parent.name
            entries = read_ledger(path)
            if run_name == self._folder.name or not entries:
                continue
            if run_name.startswith(f"{configuration}-"):
                raise FedpflError(
                    f"samples here have answered for the same configuration and seed with other"
                    f" sites, data or code ({run_name}); begin a run of another seed"
                )
            spent_by_run[run_name] = max(entries[-1].epsilon, spent_by_run.get(run_name, 0.0))

        # ---- Step 2: the limit of the node.
        planned = self._account.client_epsilon(client, len(self._account.cohorts))
        elsewhere = sum(spent_by_run.values())
        if self._limit is not None and planned + elsewhere > self._limit:
            raise FedpflError(
                f"the run plans epsilon {planned:.3g} for it, other runs have given away"
                f" {elsewhere:.3g}, and its node allows {self._limit:g} in all (epsilon= in its"
                " node-config)"
            )

    def _read_key(self) -> bytes:
        """Return the run's key, made once. Raises FedpflError where it is lost."""
        path = self._folder / KEY_FILE
        key = files.read_if_exists(path) or b""
        if len(key) == KEY_BYTES:
            return key
        if any(map(read_ledger, self._folder.glob(f"client*/{LEDGER_FILE}"))):
            raise FedpflError(
                f"{path} is gone or damaged, and samples have answered by it; bring it back, or"
                " begin a run of another seed"
            )
        key = secrets.token_bytes(KEY_BYTES)
        files.write_private(path, key)
        return key


def _describe_kind(call: Call) -> tuple[str, int]:
    """Return the kind and the round of a question in a ledger."""
    if isinstance(call, TrainCall):
        trains = call.survey is None or call.survey.trains
        return TRAINING if trains else SURVEY, call.state.round + 1
    return TUNING if call.tuning else EVALUATION, call.state.round


def require_promise(plan: Plan, limit: float | None) -> None:
    """Raise FedpflError for a run that promises less than a node asks for.

    Args:
        plan: Of the run.
        limit: The most epsilon that the node allows; None for any, and for runs without.
    """
    if limit is None:
        return
    privacy = plan.privacy
    is_promise = isinstance(privacy, SamplePrivacy) and privacy.noise != 0 and privacy.seed is None
    if not is_promise:
        raise FedpflError(
            f"this node takes part in runs of privacy=sample alone, up to epsilon {limit:g}"
            " (epsilon= in its node-config), and this run promises its samples nothing"
        )


def digest_question(*parts: bytes) -> str:
    """Return a digest of a question and the state that it meets."""
    # A server chooses much of it, and must not find two questions of one digest.
    question = hashlib.blake2b(digest_size=32)
    for part in parts:
        question.update(hashlib.blake2b(part).digest())
    return question.hexdigest()


def read_ledger(path: Path) -> list[Spending]:
    """Return a client's ledger, in order; [] before its first answer.

    Raises:
        FedpflError: It is damaged.
    """
    content = files.read_if_exists(path) or b""
    try:
        rows = csv.DictReader(io.StringIO(content.decode()))
        return [Spending.model_validate(row) for row in rows]
    except ValueError:
        raise FedpflError(
            f"{path} is damaged, so the spent epsilon is unknown; bring it back, or begin a run of"
            " another seed"
        ) from None
