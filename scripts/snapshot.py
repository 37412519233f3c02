"""Record what every method computes on both backends, or compare with a record.

    python scripts/snapshot.py before.pt     # writes the file
    python scripts/snapshot.py before.pt     # after a change: says what is not bit-equal

The exit status is 1 if anything differs.

Per method and contract setting, without and with BatchNorm: two rounds' states and outcomes, and
the evaluation of all clients after them, plain and fine-tuned. A few minutes on one core.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fedpfl.engine import Engine, FineTuning, make_backend
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

COHORTS = [[0, 2, 3, 5], [0, 1, 4, 5]]
ALL_CLIENTS = list(range(6))
FEDERATION = make_federation((40, 7, 33, 2, 65, 1), (12, 3, 9, 0, 14, 1))


def record_method(name: str, values: dict, norm: bool, backend_name: str) -> dict[str, Tensor]:
    """Return all tensors that a method computes, by path."""
    method = METHODS[name](**values)
    net = tiny(norm)
    engine = Engine(backend_name)
    states, outcomes = record_rounds(method, net, FEDERATION, COHORTS, engine=engine)
    backend = make_backend(engine, net, CPU)
    fine_tunings = {"plain": None, "tuned": FineTuning(LOCAL, Draws(0, "finetune", 2))}
    results = {
        "state": dict(enumerate(states[1:])),
        "outcome": [
            {
                "before": outcome.before,
                "after": outcome.after,
                "loss": outcome.loss,
                "finite": outcome.finite,
                "measures": outcome.metrics,
                **outcome.traffic._asdict(),
            }
            for outcome in outcomes
        ],
        "judged": {
            key: backend.evaluate(EvalCall(method, FEDERATION, states[-1], ALL_CLIENTS, tuning))
            for key, tuning in fine_tunings.items()
        },
    }
    return {path: torch.as_tensor(leaf) for path, leaf in flatten(results).items()}


def main(path: Path) -> int:
    """Write the record, or compare with it."""
    torch.set_num_threads(1)
    records = {}
    for case, norm, backend_name in itertools.product(CASES, (False, True), BACKENDS):
        key = f"{case.id}{'/norm' if norm else ''}/{backend_name}"
        records[key] = record_method(*case.values, norm, backend_name)
    if not path.exists():
        torch.save(records, path)
        leaf_count = sum(len(leaves) for leaves in records.values())
        print(f"{len(records)} records, {leaf_count:,} leaves in {path}")
        return 0
    stored_records = torch.load(path)
    differences = []
    for key in sorted(stored_records.keys() | records.keys()):
        for line in compare_records(stored_records.get(key, {}), records.get(key, {})):
            differences.append(f"{key}{line}")
    print("\n".join([*differences, f"{len(differences)} differences in {len(records)} records"]))
    return bool(differences)


def compare_records(stored: dict[str, Tensor], current: dict[str, Tensor]) -> Iterator[str]:
    """Yield a line for each tensor that is not bit-equal."""
    for path in sorted(stored.keys() ^ current.keys()):
        yield f"{path}: only {'before' if path in stored else 'now'}"
    for path in sorted(stored.keys() & current.keys()):
        a, b = stored[path], current[path]
        if a.shape != b.shape:
            yield f"{path}: differs by at most {a.shape} and {b.shape}"
        elif not torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7)):
            yield f"{path}: differs by at most {(a.double() - b.double()).abs().max():.1e}"


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
