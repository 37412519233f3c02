"""Spend what a node's samples may give away: each planned question is answered once, with noise.

A server may ask for a round again, or for more than is planned. The node's plan is its own, made of
the configuration and seed; a ledger of what was answered lies beside the clients' states.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import math
import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedpfl.config.plan import Plan
from fedpfl.config.run import Run
from fedpfl.engine.calls import Call, TrainCall
from fedpfl.engine.keys import Draws
from fedpfl.ground import files
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.lock import open_alone
from fedpfl.privacy import SampleAccount, SamplePrivacy, SampleProtection, Secret
from fedpfl.runner.resume import make_secret

KEY_FILE = "privacy.key"
KEY_BYTES = 32
LEDGER_FILE = "privacy.csv"
TRAINING = "training"
TUNING = "fine-tuning"


class Spending(NamedTuple):
    """Hold a line of a client's ledger.

    Attributes:
        kind: Training or fine-tuning.
        round: Its number; of fine-tuning, the last one that was finished.
        question: A digest of all that the answer follows from.
        epsilon: What all answers so far have given away.
    """

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
        limit: The most epsilon of all runs whose folders lie beside it; None for any.
    """

    def __init__(self, run: Run, account: SampleAccount, folder: Path, limit: float | None):
        self._run = run
        self._account = account
        self._folder = folder
        self._limit = limit
        self._secret: Secret | None = None

    def protect_call(self, call: Call, client: int, question: str) -> Call:
        """Return a call with the node's noise, once it is in the ledger.

        Args:
            call: What the server asks, of one client.
            client: Its number.
            question: A digest of all that the answer follows from.

        Raises:
            FedpflError: It is not planned, or was answered about another model.
        """
        kind, round_number = self._require_planned(call, client)
        secret = self._read_secret()
        if kind:
            self._enter_question(client, kind, round_number, question)
        privacy = self._account.privacy
        # Whatever becomes of the ledger, no noise is used for two questions. That of a seed is no
        # secret, and as in the simulation.
        if privacy.seed is None:
            secret = secret.bind_to(question)
        # Of the call's client; to calibrate that of all would take a while in each process.
        noises = [self._account.client_noise(client)] * len(self._account.sizes)
        protection = SampleProtection(privacy.clip_length, noises, secret)

        def protect_draws(draws: Draws) -> Draws:
            return replace(draws, protection=protection)

        if isinstance(call, TrainCall):
            return replace(call, draws=protect_draws(call.draws))
        changes: dict[str, Any] = {}
        for name in ("tuning", "before_evaluation"):
            tuning = getattr(call, name)
            if tuning:
                changes[name] = tuning._replace(draws=protect_draws(tuning.draws))
        return replace(call, **changes)

    # ---- What is planned

    def _require_planned(self, call: Call, client: int) -> tuple[str, int]:
        """Return what a call spends, "" for nothing, and in which round.

        Raises:
            FedpflError: The account has no such steps.
        """
        run = self._run
        if isinstance(call, TrainCall):
            round_number = call.state.round + 1
            if call.survey and not call.survey.trains:
                return "", round_number
            cohorts = self._account.cohorts
            is_drawn = round_number <= len(cohorts) and client in cohorts[round_number - 1]
            local = run.local.for_round(round_number, len(cohorts))
            if not is_drawn or call.local != local or call.wants_stopping_loss:
                raise _unplanned_error(TRAINING, round_number)
            return TRAINING, round_number
        if call.before_evaluation is None:
            raise FedpflError("a message that asks for an evaluation without its draws")
        round_number = call.state.round
        if call.tuning is None:
            return "", round_number
        local = run.eval.finetuning_local(run.local)
        is_planned = round_number in self._account.tuned_rounds
        if not is_planned or (call.tuning.local, call.tuning.part) != (
            local,
            run.eval.finetune_part,
        ):
            raise _unplanned_error(TUNING, round_number)
        return TUNING, round_number

    # ---- The ledger

    def _enter_question(self, client: int, kind: str, round_number: int, question: str) -> None:
        """Enter a question into a client's ledger, unless it stands there.

        Raises:
            FedpflError: Another one was answered in its place, or the site allows no more.
        """
        self._require_limit(client)
        with _open_ledger(self._ledger_path(client)) as (descriptor, entries):
            for entry in entries:
                if (entry.kind, entry.round) == (kind, round_number):
                    if entry.question == question:
                        return
                    raise FedpflError(
                        f"its samples have answered for {kind} of round {round_number} already,"
                        " about another model, and privacy=sample has noise for one; begin a run"
                        " of another seed, which gives away as much again"
                    )
            kinds = [*(entry.kind for entry in entries), kind]
            steps = self._account.sum_steps(client, kinds.count(TRAINING), kinds.count(TUNING))
            epsilon = self._account.price_steps(client, steps)
            line = _write_line(kind, round_number, question, f"{epsilon:.6g}")
            # On the disk before anything is trained: what may have left has been entered.
            files.append_all(descriptor, line.encode())
            os.fsync(descriptor)

    def _require_limit(self, client: int) -> None:
        """Raise FedpflError where the run plans more than the site has left."""
        if self._limit is None:
            return
        planned = self._account.client_epsilon(client, len(self._account.cohorts))
        spent_by_run: dict[Path, float] = {}
        for path in self._folder.parent.glob(f"*/client*/{LEDGER_FILE}"):
            run_folder = path.parent.parent
            if run_folder != self._folder:
                spent = max((entry.epsilon for entry in read_ledger(path)), default=0.0)
                spent_by_run[run_folder] = max(spent, spent_by_run.get(run_folder, 0.0))
        elsewhere = sum(spent_by_run.values())
        if planned + elsewhere > self._limit:
            raise FedpflError(
                f"the run plans epsilon {planned:.3g} for it, other runs have given away"
                f" {elsewhere:.3g}, and its node allows {self._limit:g} in all (epsilon= in its"
                " node-config)"
            )

    def _ledger_path(self, client: int) -> Path:
        return self._folder / f"client{client}" / LEDGER_FILE

    # ---- The key

    def _read_secret(self) -> Secret:
        """Return what the node's noise is drawn from. Raises FedpflError where it is lost."""
        if self._secret is None:
            self._secret = make_secret(self._run, self._read_key)
        return self._secret

    def _read_key(self) -> bytes:
        """Return the key, which is made once for each run."""
        path = self._folder / KEY_FILE
        with files.explain_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # A process may live for one message; the first of them makes the key.
            with open_alone(path) as descriptor:
                key = os.read(descriptor, KEY_BYTES + 1)
                if len(key) != KEY_BYTES:
                    self._require_no_answers()
                    key = secrets.token_bytes(KEY_BYTES)
                    os.ftruncate(descriptor, 0)
                    files.append_all(descriptor, key)
                    os.fsync(descriptor)
        return key

    def _require_no_answers(self) -> None:
        """Raise FedpflError where clients have answered by a key that is gone."""
        for path in self._folder.glob(f"client*/{LEDGER_FILE}"):
            if read_ledger(path):
                raise FedpflError(
                    f"{self._folder / KEY_FILE} is gone or damaged, and samples have answered by"
                    " it; bring it back, or begin a run of another seed"
                )


def make_budget(run: Run, folder: Path | None, limit: float | None) -> SampleBudget | None:
    """Return what answers for a node's samples, None where nothing is promised.

    Raises:
        FedpflError: delta is too large for them.
    """
    account = run.sample_account
    if account is None:
        return None
    account.check_delta()
    assert folder, "a ledger is kept on disk"
    return SampleBudget(run, account, folder, limit)


def require_promise(plan: Plan, limit: float | None) -> None:
    """Raise FedpflError for a run that promises less than a node asks for.

    Args:
        plan: Of the run.
        limit: The most epsilon that the node allows; None for any, and for runs without.
    """
    if limit is None:
        return
    if not math.isfinite(limit) or limit <= 0:
        raise FedpflError(f"epsilon= in the node-config must be a positive number, got {limit}")
    privacy = plan.privacy
    is_promise = isinstance(privacy, SamplePrivacy) and privacy.noise != 0 and privacy.seed is None
    if not is_promise:
        raise FedpflError(
            f"this node takes part in runs of privacy=sample alone, up to epsilon {limit:g}"
            " (epsilon= in its node-config), and this run promises its samples nothing"
        )


def digest_question(*parts: bytes) -> str:
    """Return a digest of all that an answer follows from."""
    # A server chooses much of it, and must not find two questions of one digest.
    question = hashlib.blake2b(digest_size=32)
    for part in parts:
        question.update(hashlib.blake2b(part).digest())
    return question.hexdigest()


def _unplanned_error(kind: str, round_number: int) -> FedpflError:
    return FedpflError(
        f"{kind} of round {round_number} is not planned for it as it is asked for, and privacy=sample"
        " has no noise for more"
    )


def read_ledger(path: Path) -> list[Spending]:
    """Return what a client has given away, in order; [] before anything."""
    content = files.read_if_exists(path)
    return _parse_ledger(content or b"", path)


def _parse_ledger(content: bytes, path: Path) -> list[Spending]:
    """Return the lines of a ledger. Raises FedpflError for a damaged one."""
    try:
        header, *rows = csv.reader(io.StringIO(content.decode() or _write_line(*Spending._fields)))
        if tuple(header) != Spending._fields:
            raise ValueError("another header")
        entries = [Spending(kind, int(number), text, float(e)) for kind, number, text, e in rows]
    except ValueError:
        raise FedpflError(
            f"{path} is damaged, and nobody knows what samples have given away; bring it back, or"
            " begin a run of another seed"
        ) from None
    return entries


@contextlib.contextmanager
def _open_ledger(path: Path) -> Iterator[tuple[int, list[Spending]]]:
    """Give a ledger to add to, alone of all processes, and what it holds."""
    with files.explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_alone(path) as descriptor:
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            # Half a line is of a question that was never answered.
            complete = content[: content.rfind(b"\n") + 1]
            os.ftruncate(descriptor, len(complete))
            if not complete:
                files.append_all(descriptor, _write_line(*Spending._fields).encode())
            yield descriptor, _parse_ledger(complete, path)


def _write_line(*cells: object) -> str:
    return ",".join(map(str, cells)) + "\n"
