"""Client states in host memory or on disk: the same numbers, no file left, a full disk told of in
one line.
"""

import copy
import errno
import os
from dataclasses import replace

import pytest
import torch

from fedpfl.engine import (
    SPARE,
    Engine,
    RoundSetup,
    Store,
    draw_cohorts,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.store import RowStorage
from fedpfl.ground import memory, tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import Ditto, FedAvg, FedOBP
from tests.command import (
    TINY,
    TINY_TASK,
    play_run,
    read_checkpoint,
    read_table,
    run_command,
    snapshot,
)
from tests.conftest import COHORTS, CPU, LOCAL, assert_same, keep_quick, make_federation, tiny

OBP = FedOBP(q=0.9, ema=0.3)


def played(store, folder, backend, method, federation, device=CPU):
    net = tiny(norm=True)
    runner = make_backend(Engine(backend), net, device)
    now = make_initial_state(method, net, federation.clients, device, RowStorage(store, folder))
    there = federation.to(device)
    for cohort in COHORTS[:2]:
        now, _ = play_round(RoundSetup(runner, method, there, LOCAL, 0), now, cohort)
    return now, runner.evaluate(EvalCall(method, there, now, list(range(there.clients))))


ON_GPU = [
    pytest.param(where, "batched", "cuda", marks=pytest.mark.cuda) for where in ("cpu", "disk")
]


@pytest.mark.parametrize("method", keep_quick([OBP, Ditto(), FedAvg()]))
@pytest.mark.parametrize(
    ("where", "backend", "place"), [("cpu", "batched", "cpu"), ("disk", "loop", "cpu"), *ON_GPU]
)
def test_where_states_live_changes_no_bit(where, backend, place, method, federation, tmp_path):
    device = torch.device(place)
    here, counts = played(Store(), None, backend, method, federation, device)
    there, other = played(Store(where), tmp_path, backend, method, federation, device)
    assert os.listdir(tmp_path) == []  # files have no name
    for trees, kind in ((there.rows.trees, "cpu"), ([there.clients], place)):
        assert {leaf.device.type for own in trees for leaf in tree.leaves(own)} <= {kind}
    assert_same(here, there)
    assert_same(counts, other)


def test_a_full_disk_is_one_line(federation, tmp_path, monkeypatch):
    def full(file, start, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    told = r"state\.device=disk needs .* MiB more in .*: No space left on device; make"
    with pytest.raises(FedpflError, match=told):
        played(Store("disk"), tmp_path, "loop", OBP, federation)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("where", keep_quick(["auto", "disk"]))
def test_memory_grows_with_those_who_took_part(where, tmp_path):
    """Of 10,000 clients; an eighth of the rows may stand empty."""
    net, few = tiny(), make_federation((8,) * 4, (2,) * 4)
    clients = replace(few, train=few.train * 2500, test=few.test * 2500)
    runner = make_backend(Engine("loop"), net, CPU)
    now = make_initial_state(OBP, net, clients.clients, CPU, RowStorage(Store(where), tmp_path))
    each = tree.nbytes(now.rows.initial)
    assert sum(map(tree.nbytes, now.rows.trees)) == each
    cohorts = list(draw_cohorts(0, 10_000, 0.001, 7))
    for cohort in cohorts:
        now, _ = play_round(RoundSetup(runner, OBP, clients, LOCAL, 0), now, cohort)
    took_part = {client for cohort in cohorts for client in cohort}
    held = sum(map(tree.nbytes, now.rows.trees)) - each
    assert len(now.rows) == len(took_part)
    assert each * len(took_part) <= held <= each * len(took_part) * (1 + 1 / SPARE)


def test_rows_are_saved_without_those_that_stand_empty_and_loaded_into_the_same_blocks(net):
    rows, again = (make_initial_state(OBP, net, 100, CPU).rows for _ in range(2))
    draw = lambda leaf: torch.rand(leaf.shape).to(leaf)  # noqa: E731
    order = torch.randperm(100, generator=torch.Generator().manual_seed(3)).tolist()
    for at in range(0, 60, 20):
        some = order[at : at + 20]
        rows.put_(some, {"client": tree.map(draw, rows.take("client", some))})
    saved = rows.saved()
    assert torch.cat([block["who"] for block in saved]).tolist() == order[:60]
    assert all(len(leaf) == len(block["who"]) for block in saved for leaf in tree.leaves(block))
    again.load_(copy.deepcopy(saved))
    for one in (rows, again):
        one.put_(order[60:80], {"client": one.take("client", order[60:80])})
    assert_same(again.saved(), rows.saved())
    assert_same(again.take("client", range(100)), rows.take("client", range(100)))


RUN = (*TINY, "rounds=4", "quantile.q=0.9")


def test_a_run_with_its_states_elsewhere_is_the_same_run(tmp_path):
    here, there = tmp_path / "here", tmp_path / "disk"
    play_run(here, *RUN)
    assert "(state.device=disk)" in play_run(there, *RUN, "state.device=disk")
    assert_same(read_checkpoint(here), read_checkpoint(there))
    assert read_table(here / "rounds.csv") == read_table(there / "rounds.csv")
    assert set(snapshot(here)) == set(snapshot(there))


NETWORK = ("model=mlp", "model.hidden=[1000]")
"""Of 3 MiB of parameters."""
LARGE = (*TINY_TASK, "rounds=4", "quantile.q=0.9", *NETWORK)


def test_what_a_run_will_take_is_told(tmp_path):
    """Local training keeps a model per client, of 4 bytes an entry, and none at the server; one
    more is the initial.
    """
    own = ("method=local_only", "rounds=2", "clients=8", "participation=0.25")
    told = play_run(tmp_path, *TINY_TASK, *NETWORK, *own)
    cohort = {client for drawn in draw_cohorts(42, 8, 0.25, 2) for client in drawn}
    each = 4 * (784 * 1000 + 1000 + 1000 * 10 + 10) / 2**20
    assert len(cohort) == 3
    assert (
        f"client states (state.device=auto) up to {5 * each:,.0f} MiB once 4 clients have trained; "
        f"checkpoint up to {4 * each:,.0f} MiB" in told
    )
    size = (tmp_path / "state.pt").stat().st_size
    assert size / 2**20 == pytest.approx(3 * each, abs=0.1)


def test_states_that_no_memory_can_hold_are_refused_before_anything_is_written(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(memory, "device_memory", lambda place: (2.0**21, 2.0**21))
    result = run_command(*LARGE, "hydra.run.dir=run", cwd=tmp_path)
    assert result.code == 2
    assert result.complaints == [
        "fedpfl: the states of the 4 clients that will train take up to 15 MiB, and cpu has"
        " 2; use state.device=disk"
    ]
    assert os.listdir(tmp_path) == []
