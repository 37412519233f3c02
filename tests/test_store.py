"""Client states in host memory or on disk: the same numbers, no file left, a full disk told of in one line."""

import copy
import errno
import os

import pytest
import torch

from fedpfl.engine import Engine, Store, begin, make, play
from fedpfl.errors import FedpflError
from fedpfl.methods import Ditto, FedAvg, FedOBP
from tests.command import TINY, call, snapshot, start, state, table, wait
from tests.conftest import BACKENDS, COHORTS, CPU, LOCAL, assert_same, flatten, tiny

OBP = FedOBP(q=0.9, ema=0.3)


def played(store, folder, backend, method, federation, device=CPU):
    net = tiny(norm=True)
    runner = make(Engine(backend), net, device)
    now = begin(method, net, federation.clients, device, store, folder)
    for cohort in COHORTS:
        now, _ = play(runner, method, federation.to(device), now, cohort, LOCAL, 0)
    return now, runner.evaluate(method, federation.to(device), now, list(range(federation.clients)))


@pytest.mark.parametrize("method", [OBP, Ditto(), FedAvg()], ids=["fedobp", "ditto", "fedavg"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_where_states_live_changes_no_bit(where, backend, method, federation, tmp_path):
    here, counts = played(Store(), None, backend, method, federation)
    there, other = played(Store(where), tmp_path, backend, method, federation)
    assert_same(here, there)
    assert_same(counts, other)


def test_files_have_no_name(federation, tmp_path):
    now, _ = played(Store("disk"), tmp_path, "loop", OBP, federation)
    assert os.listdir(tmp_path) == []
    assert now.clients  # and are still there


def test_a_state_is_kept_as_it_is(federation, tmp_path):
    now, _ = played(Store(), None, "loop", OBP, federation)
    kept = Store("disk").keep(now.clients, CPU, tmp_path)
    before = copy.deepcopy(now.clients)
    assert_same(kept, before)
    next(iter(kept.values()))[next(iter(next(iter(kept.values()))))].fill_(7)
    assert_same(now.clients, before)  # a copy


def test_a_full_disk_is_one_line(federation, tmp_path, monkeypatch):
    def full(file, start, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FedpflError, match=r"state\.device=disk needs .* MiB more in .*: No space left on device; make"):
        begin(OBP, tiny(), 10, CPU, Store("disk"), tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.cuda
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_states_beside_a_gpu(where, federation, tmp_path):
    gpu = torch.device("cuda")
    here, _ = played(Store(), None, "batched", OBP, federation, gpu)
    there, _ = played(Store(where), tmp_path, "batched", OBP, federation, gpu)
    assert {leaf.device.type for leaf in flatten(there.clients).values()} == {"cpu"}
    assert_same({"server": here.server}, {"server": there.server})


# The command

RUN = (*TINY, "rounds=4", "quantile.q=0.9", "model=mlp", "model.hidden=[8]")


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_run_with_its_states_elsewhere_is_the_same_run(where, tmp_path):
    assert call(*RUN, "hydra.run.dir=here", cwd=tmp_path).code == 0
    result = call(*RUN, "hydra.run.dir=there", f"state.device={where}", cwd=tmp_path)
    assert result.code == 0, result.err
    assert {"cpu": "in host memory", "disk": "on disk"}[where] in result.err
    assert_same(state(tmp_path / "here"), state(tmp_path / "there"))
    assert table(tmp_path / "here" / "rounds.csv") == table(tmp_path / "there" / "rounds.csv")
    assert set(snapshot(tmp_path / "here")) == set(snapshot(tmp_path / "there"))


def test_killed_with_its_states_on_disk_it_resumes_the_same(tmp_path):
    assert call(*RUN, "hydra.run.dir=here", cwd=tmp_path).code == 0
    killed = """
import os, signal
from fedpfl import record, train
real = record.RunDirectory.checkpoint
def last(self, payload):
    real(self, payload)
    if payload["round"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
record.RunDirectory.checkpoint = last
train.main()
"""
    arguments = (*RUN, "hydra.run.dir=there", "state.device=disk")
    assert wait(start(*arguments, cwd=tmp_path, script=killed)).code == -9
    assert not [path for path in (tmp_path / "there").iterdir() if path.name.startswith(".clients")]
    result = call(*arguments, cwd=tmp_path)
    assert "resumed     after round 2" in result.err
    assert_same(state(tmp_path / "here"), state(tmp_path / "there"))


def test_another_place_is_refused(tmp_path):
    result = call(*RUN, "state.device=tape", cwd=tmp_path)
    assert result.code == 2
    assert result.complaints == ["fedpfl: state.device must be one of auto, cpu, disk, got 'tape'"]
