"""What masks.json tells of clients' masks, against a plain count of sets of entries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpfl import engine
from fedpfl.engine import masks
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import PSPFL, FedCAC, FedOBP, FedPURIN, FedSelect, Method
from fedpfl.report.load import read_started_run
from fedpfl.report.run import MaskOverlap
from tests.command import TINY, play_run, read_summary
from tests.conftest import make_federation, record_states, tiny
from tests.report.test_report import write_run

COHORTS = [[0, 2, 3, 5], [0, 1, 5]]  # client 4 never takes part
TOOK_PART = [0, 1, 2, 3, 5]


def counted(own: dict[int, set[tuple[int, ...]]], entries: int) -> dict[str, Any]:
    """By plain sets of the places of entries."""
    times = [sum(place in mask for mask in own.values()) for place in set().union(*own.values())]
    held = [entries - len(times), *(times.count(number) for number in range(1, len(own) + 1))]
    return {
        "entries": entries,
        "held": held,
        "both": [[len(a & b) for b in own.values()] for a in own.values()],
    }


@pytest.mark.parametrize(
    "method",
    [FedSelect(p=0.5), FedPURIN(tau=0.3), FedCAC(), FedOBP(q=0.8), PSPFL()],
    ids=lambda method: type(method).__name__,
)
def test_masks_are_counted_as_sets(method: Method) -> None:
    state = record_states(method, tiny(norm=True), make_federation(), COHORTS)[-1]
    found = engine.compare_masks(method, state)
    assert found is not None
    assert found["clients"] == TOOK_PART
    for tensor, told in found["tensors"].items():
        own = {}
        for client in TOOK_PART:
            # FedSelect's and FedPURIN's stand in the state; the others' follow from it.
            given = state.client(client)
            mask = given.get("mask") or method.prepare(state.server, given)["mask"]
            own[client] = set(map(tuple, mask[tensor].nonzero().tolist()))
        assert told == counted(own, mask[tensor].numel())
    assert any(0 < told["held"][0] < told["entries"] for told in found["tensors"].values())


def test_only_so_many_clients_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    method, state = FedSelect(), record_states(FedSelect(), tiny(), make_federation(), COHORTS)[-1]
    whole = engine.compare_masks(method, state)
    monkeypatch.setattr(masks, "MOST", 3)
    monkeypatch.setattr(masks, "EXACT", 50)  # in many parts
    few = engine.compare_masks(method, state)
    assert few["clients"] == TOOK_PART[:3]
    for name, told in few["tensors"].items():
        assert np.array_equal(told["both"], np.array(whole["tensors"][name]["both"])[:3, :3])
        assert sum(told["held"]) == told["entries"]


def test_of_what_processes_collect_so_many_clients_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each gives its own first ones, which together are more."""
    method, state = FedSelect(), record_states(FedSelect(), tiny(), make_federation(), COHORTS)[-1]
    state.rows.is_stored_here = lambda client: True
    given: list[Any] = []
    monkeypatch.setattr(masks.ranks, "gather_to_main", lambda own: given.extend(own) or own)
    whole = engine.compare_masks(method, state)
    monkeypatch.setattr(masks.ranks, "gather_to_main", lambda own: given[1::2] + given[::2])
    assert engine.compare_masks(method, state) == whole
    monkeypatch.setattr(masks, "MOST", 3)
    assert engine.compare_masks(method, state)["clients"] == TOOK_PART[:3]


def test_a_run_leaves_them_once_and_mends_them(tmp_path: Path) -> None:
    words = (*TINY, "method=fedselect", "eval.finetune_epochs=0")
    play_run(tmp_path / "run", *words)
    path = tmp_path / "run/masks.json"
    whole = path.read_bytes()
    assert json.loads(whole)["clients"] == sorted(json.loads(whole)["clients"])
    assert "masks.json" in read_summary(tmp_path / "run")["files"]
    path.write_text("{}")
    assert "masks.json is damaged: written anew from state.pt" in play_run(tmp_path / "run", *words)
    assert path.read_bytes() == whole
    play_run(tmp_path / "run", *words, "restart=true", "rounds=2")
    assert path.read_bytes() == whole
    play_run(tmp_path / "other", *words, "method=fedavg")
    assert not (tmp_path / "other/masks.json").exists()


def test_overlap_by_hand() -> None:
    """Of 10 entries one client holds 4, one 5, three of them both, and one nothing."""
    mask = MaskOverlap(10, np.array([4, 3, 3, 0.0]), np.array([[4, 3, 0], [3, 5, 0], [0, 0, 0.0]]))
    assert mask.overlaps().tolist() == [3 / 6, 0, 0]
    assert mask.overlaps(chance=True).tolist() == [2 / 7, 0, 0]  # 4 * 5 / 10 in common
    empty = MaskOverlap(10, np.array([10, 0, 0.0]), np.zeros((2, 2)))
    assert np.isnan(empty.overlaps()).all()


WHOLE = {
    "clients": [0, 3],
    "tensors": {"w": {"entries": 5, "held": [2, 2, 1], "both": [[2, 1], [1, 2]]}},
}


def test_masks_are_read(tmp_path: Path) -> None:
    run = read_started_run(write_run(tmp_path / "a", {2: 90.0}))
    assert run.masks == {}
    (tmp_path / "a/masks.json").write_text(json.dumps(WHOLE))
    mask = read_started_run(tmp_path / "a").masks["w"]
    assert (mask.entries, mask.holder_counts.tolist()) == (5, [2, 2, 1])
    assert mask.pair_counts.tolist() == [[2, 1], [1, 2]]
    assert mask.overlaps().tolist() == [1 / 3]


@pytest.mark.parametrize(
    "change",
    [
        {"held": [2, 2]},
        {"held": [2, 2, 2]},
        {"held": [-1, 6, 0]},
        {"held": [1, 4, 0], "both": [[2, 1], [1, 3]]},
        {"both": [[2, 1]]},
        {"both": [[2, 3], [3, 2]]},
        {"both": [[2, "x"], [1, 2]]},
        {"entries": "five"},
    ],
)
def test_numbers_that_are_no_masks_are_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", {2: 90.0})
    changed = {**WHOLE, "tensors": {"w": WHOLE["tensors"]["w"] | change}}
    for text in (json.dumps(changed), json.dumps(change), "[", ""):
        (folder / "masks.json").write_text(text)
        with pytest.raises(FedpflError, match=r"masks\.json") as told:
            _ = read_started_run(folder).masks
        assert "\n" not in str(told.value)
