"""Remember the answers that a round's noise was added to.

A stopped server plays a round again after nodes may have seen its model. With other answers and the
same noise, the difference of both models would have no noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from fedpfl.engine.calls import Participation
from fedpfl.ground import files
from fedpfl.ground.errors import FedpflError
from fedpfl.remote import wire

RELEASE_FILE = "releases.json"


class Releases(BaseModel):
    """The answers of each round by digests.

    Attributes:
        secret: A digest of the run's key, which is new when the run begins anew.
        rounds: The digest of each client's answer, by round.
    """

    secret: str
    rounds: dict[int, dict[int, str]] = {}


def select_answers(
    run_directory: Path, round_number: int, answers: Mapping[int, Participation]
) -> dict[int, Participation]:
    """Return the answers that a round's noise is for; first all, which are noted.

    Raises:
        FedpflError: An answer is missing, or differs from the earlier one.
    """
    # ---- Step 1: the record of this run.
    path = run_directory / RELEASE_FILE
    summary = json.loads((run_directory / "summary.json").read_text())
    record = Releases(secret=summary["secret"])
    content = files.read_if_exists(path)
    if content is not None:
        try:
            stored = Releases.model_validate_json(content)
        except ValidationError:
            raise files.damaged_error(path) from None
        record = stored if stored.secret == record.secret else record

    # ---- Step 2: this round's answers are noted, or were.
    digests = {
        client: files.content_digest(wire.pack_message({}, answer.uploads))
        for client, answer in answers.items()
    }
    noted = record.rounds.setdefault(round_number, digests)
    if noted is digests:
        with files.durable_write(path) as file:
            file.write(record.model_dump_json().encode())
    changed = [client for client in noted if digests.get(client) != noted[client]]
    if changed:
        raise FedpflError(
            f"round {round_number} was played before the server was stopped, and clients"
            f" {', '.join(map(str, changed))} do not answer as they did: noise of privacy=client"
            " is for one set of answers; bring their nodes back with their states, and give the"
            " same command again"
        )
    return {client: answers[client] for client in answers if client in noted}
