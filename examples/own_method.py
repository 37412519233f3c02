"""A method of your own, tried and trained: `python examples/own_method.py`, or by pytest.

Clients keep the last model that they trained, and are tested between it and the server's.
"""

from dataclasses import dataclass
from typing import Annotated

import fedpfl
from fedpfl.ground.ranges import Between
from fedpfl.methods import FedAvg
from fedpfl.testing import parametrize_with_promises


@dataclass(frozen=True)
class Halfway(FedAvg):
    """Evaluate clients between the server's model and their last one."""

    share: Annotated[float, Between(0, 1)] = 0.5  # of the last one

    def init(self, params, parts):
        return params, {"last": params}

    def finish(self, server, client, start, params):
        return params, {"last": params}

    def personal(self, server, client):
        last = client["last"]
        return {name: server[name] + self.share * (last[name] - server[name]) for name in server}


METHODS = {"halfway": Halfway}


@parametrize_with_promises(method=Halfway, share=0.3)
def test_halfway(check):
    check()


if __name__ == "__main__":
    settings = {"plugins": [__file__], "model": "mlp", "clients": 10, "participation": 0.5}
    for share in (0.0, 0.5, 1.0):
        run = fedpfl.run(
            "method=halfway", method={"share": share}, rounds=10, progress=False, **settings
        )
        print(share, round(run.rounds["accuracy"].iloc[-1], 2))
