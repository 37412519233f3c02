"""The choice of a backend: what `engine=auto` is on each device, and what a resumed run keeps."""

import logging
from dataclasses import replace

import pytest
import torch

from fedpfl.engine import Engine, FallbackBackend, Local, make_backend
from fedpfl.engine.backends.backend import Backend
from fedpfl.engine.backends.selection import choose_backend
from fedpfl.methods import FedAvg
from tests.conftest import CPU, assert_same, tiny
from tests.engine.test_program import play_on


class Failing(Backend):
    """A batched backend that fails from its n-th run on."""

    name = "batched"

    def __init__(self, engine, net, run):
        self._own = make_backend(replace(engine, graphs=False), net, CPU)
        self.engine, self.net, self._runs = engine, net, run

    def run(self, calls):
        self._runs -= 1
        if self._runs > 0:
            return self._own.run(calls)
        try:
            raise ValueError("no such kernel")
        except ValueError as error:
            return [error for _ in calls]


def fall_back(net, run, loop_run=99):
    runs = {"batched": run, "loop": loop_run}
    return FallbackBackend(
        Engine("batched"), lambda engine: Failing(engine, net, runs[engine.backend])
    )


def test_loop_is_taken_where_the_first_cohort_fails(federation, net, caplog):
    runner = fall_back(net, run=1)
    with caplog.at_level(logging.WARNING):
        found = play_on(runner, FedAvg(), federation)
    assert_same(found, play_on(make_backend(Engine("loop"), net, CPU), FedAvg(), federation))
    assert runner.engine == Engine("loop", graphs=False)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["engine: loop is taken, as batched fails: no such kernel"]


@pytest.mark.parametrize(("run", "loop_run"), [(2, 99), (1, 1)])
def test_a_run_is_never_computed_in_two_ways_and_an_error_of_loop_is_raised(
    run, loop_run, federation, net
):
    runner = fall_back(net, run, loop_run)
    with pytest.raises(ValueError, match="no such kernel"):
        play_on(runner, FedAvg(), federation)
    assert (runner.engine == Engine("batched")) == (run == 2)


def test_what_was_recorded_is_taken_without_being_tried(net):
    """And a width that memory ran out for is kept by a resumed run."""
    known = {"backend": "loop", "graphs": False, "width": 3}
    assert choose_backend(Engine(), net, CPU, known).engine == Engine(**known)
    assert choose_backend(Engine(), net, CPU).name == "loop"
    recorded = {"backend": "batched", "graphs": False, "width": 3}
    for width, resumed in ((0, 3), (8, 3), (2, 2)):
        engine = Engine("batched", width=width)
        assert choose_backend(engine, net, CPU, recorded).engine.width == resumed
    assert choose_backend(Engine("loop"), net, CPU, recorded).engine == Engine("loop")


class Small(type(make_backend(Engine("batched"), tiny(), CPU))):
    """A GPU with room for four clients."""

    def _follow(self, slices):
        if sum(len(own.clients) for own in slices) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super()._follow(slices)


def test_the_width_is_halved_where_memory_runs_out(federation, net, caplog):
    ends = []
    for runner in (
        Small(net, CPU, Engine("batched")),
        make_backend(Engine("batched", width=2), net, CPU),
    ):
        with caplog.at_level(logging.WARNING):
            cohorts = [list(range(federation.clients))] * 2
            ends.append(play_on(runner, FedAvg(), federation, cohorts, Local(1, 32, 0.1)))
        assert runner.engine.width == 2  # 10, 5, 2
    assert [record.getMessage() for record in caplog.records] == [
        f"engine: out of memory; from here on {width} clients at a time (engine.width={width})"
        for width in (5, 2)
    ]
    assert_same(*ends)
