"""A method of your own, tried and trained: `python examples/own_method.py`, or by pytest."""

from dataclasses import dataclass
from typing import Annotated

import fedpfl
from fedpfl.ground.ranges import Between
from fedpfl.methods import FedAvg
from fedpfl.testing import parametrize_with_promises


@dataclass(frozen=True)
class Halfway(FedAvg):
    """Evaluate clients between the server's model and the last one that they trained."""

    share: Annotated[float, Between(0, 1)] = 0.5  # of the client's own

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
    words = ["model=mlp", "clients=10", "participation=0.5", "rounds=10", "method.share=0,0.5,1"]
    _, table = fedpfl.sweep("method=halfway", *words, plugins=[__file__], progress=False)
    print(table[["method.share", "accuracy"]].round(2).to_string(index=False))
