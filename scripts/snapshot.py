"""Record what every method computes on both backends, or compare with a record: `snapshot.py FILE`,
twice.

    python scripts/snapshot.py before.pt     # writes the file
    python scripts/snapshot.py before.pt     # after a change: says what is not bit-equal; exit status 1 if anything is

Per method and contract setting, without and with BatchNorm: two rounds' states and outcomes, and
the evaluation of all clients after them, plain and fine-tuned. A few minutes on one core.
"""

import itertools
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fedpfl.engine import Engine, FineTuning, make
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.methods import METHODS
from tests.conftest import (
    BACKENDS,
    CASES,
    CPU,
    LOCAL,
    flatten,
    make_federation,
    record_rounds,
    tiny,
)

COHORTS, EVERYONE = [[0, 2, 3, 5], [0, 1, 4, 5]], list(range(6))
FEDERATION = make_federation((40, 7, 33, 2, 65, 1), (12, 3, 9, 0, 14, 1))


def record(name: str, values: dict, norm: bool, backend: str) -> dict[str, Tensor]:
    """Return all leaves by path."""
    method, net, engine = METHODS[name](**values), tiny(norm), Engine(backend)
    states, outcomes = record_rounds(method, net, FEDERATION, COHORTS, engine=engine)
    judge = make(engine, net, CPU)
    tunings = {"plain": None, "tuned": FineTuning(LOCAL, Draws(0, "finetune", 2))}
    found = {
        "state": dict(enumerate(states[1:])),
        "outcome": [
            {
                "before": o.before,
                "after": o.after,
                "loss": o.loss,
                "finite": o.finite,
                "measures": o.metrics,
                **o.traffic._asdict(),
            }
            for o in outcomes
        ],
        "judged": {
            k: judge.evaluate(EvalCall(method, FEDERATION, states[-1], EVERYONE, tuning))
            for k, tuning in tunings.items()
        },
    }
    return {path: torch.as_tensor(leaf) for path, leaf in flatten(found).items()}


def main(path: Path) -> int:
    """Write the record, or compare with it."""
    torch.set_num_threads(1)
    now = {}
    for case, norm, backend in itertools.product(CASES, (False, True), BACKENDS):
        now[f"{case.id}{'/norm' if norm else ''}/{backend}"] = record(*case.values, norm, backend)
    if not path.exists():
        torch.save(now, path)
        print(f"{len(now)} records, {sum(map(len, now.values())):,} leaves in {path}")
        return 0
    before, faults = torch.load(path), []
    for key in sorted(before.keys() | now.keys()):
        a, b = before.get(key, {}), now.get(key, {})
        faults += [
            f"{key}{leaf}: only {'before' if leaf in a else 'now'}"
            for leaf in sorted(a.keys() ^ b.keys())
        ]
        faults += [
            f"{key}{leaf}: differs by at most {_distance(a[leaf], b[leaf])}"
            for leaf in sorted(a.keys() & b.keys())
            if a[leaf].shape != b[leaf].shape
            or not torch.equal(a[leaf].nan_to_num(7e7), b[leaf].nan_to_num(7e7))
        ]
    print("\n".join([*faults, f"{len(faults)} differences in {len(now)} records"]))
    return bool(faults)


def _distance(a: Tensor, b: Tensor) -> str:
    return (
        f"{(a.double() - b.double()).abs().max():.1e}"
        if a.shape == b.shape
        else f"{a.shape} and {b.shape}"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
