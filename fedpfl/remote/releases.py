"""Remember the answers that a round's noise was added to.

A stopped server plays a round again after nodes may have seen its model. With other answers and the
same noise, the difference of both models would have no noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from fedpfl.engine.calls import Participation
from fedpfl.ground import files
from fedpfl.ground.errors import FedpflError
from fedpfl.remote import wire

RELEASE_FILE = "releases.json"


class ReleaseRecord:
    """Remember the answers of each round by digests, in the run directory.

    Args:
        run_directory: Of the run.
    """

    def __init__(self, run_directory: Path):
        self._path = run_directory / RELEASE_FILE
        self._summary_file = run_directory / "summary.json"

    def select_answers(
        self, round_number: int, answers: Mapping[int, Participation]
    ) -> dict[int, Participation]:
        """Return the answers that a round's noise is for; first all, which are noted.

        Raises:
            FedpflError: An answer is missing, or differs from the earlier one.
        """
        digests = {
            str(client): files.content_digest(wire.pack_message({}, answer.uploads))
            for client, answer in answers.items()
        }
        digests_by_round = self._read_digests()
        noted = digests_by_round.get(str(round_number))
        if noted is None:
            digests_by_round[str(round_number)] = digests
            self._write_digests(digests_by_round)
            return {**answers}
        changed = [client for client in noted if digests.get(client) != noted[client]]
        if changed:
            raise FedpflError(
                f"round {round_number} was played before the server was stopped, and clients"
                f" {', '.join(changed)} do not answer as they did: noise of privacy=client is for"
                " one set of answers; bring their nodes back with their states, and give the same"
                " command again"
            )
        return {client: answers[client] for client in answers if str(client) in noted}

    def _read_digests(self) -> dict[str, dict[str, str]]:
        """Return the digests by round and client; {} of a run with another key."""
        content = files.read_if_exists(self._path)
        if content is None:
            return {}
        try:
            noted = json.loads(content)
            return dict(noted["rounds"]) if noted["secret"] == self._key_digest else {}
        except (ValueError, KeyError, TypeError):
            raise files.damaged_error(self._path) from None

    def _write_digests(self, digests_by_round: Mapping[str, Mapping[str, str]]) -> None:
        content = {"secret": self._key_digest, "rounds": digests_by_round}
        with files.durable_write(self._path, lambda: None) as file:
            file.write(json.dumps(content).encode())

    @property
    def _key_digest(self) -> str:
        """Return the digest of the run's key, which is new when the run begins anew."""
        return str(json.loads(self._summary_file.read_text())["secret"])
