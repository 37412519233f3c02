"""What only a pretended GPU shows: `tests/engine/test_program.py` runs this file in a process that
has one.

Every method is played with captured steps and compared with the CPU's batched backend. The same
kernels compute both, in steps of other shapes: they agree within 1e-6, and a relative 1e-5.
"""

import dataclasses
import gc
import logging
from collections import Counter
from typing import ClassVar

import pytest
import torch

from fedpfl.engine import (
    Engine,
    FineTuning,
    RoundSetup,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.calls import EvalCall, TrainCall
from fedpfl.engine.evaluate import non_finite_clients, scores_per_client, summarize_scores
from fedpfl.engine.keys import Draws, generator
from fedpfl.ground import tree
from fedpfl.methods import METHODS, Ditto, FedAvg, FedSelect, PFedMe
from tests.command import TINY, run_command
from tests.conftest import (
    BACKENDS,
    COHORTS,
    CPU,
    LOCAL,
    assert_close,
    assert_same,
    every_method,
    flatten,
    keep_quick,
    make_federation,
    tiny,
)
from tests.pretend import Graph, Refused, seen

GPU, OTHER = torch.device("cuda:0"), torch.device("cuda:1")
EVERYONE = list(range(10))
COPY = "copy from cuda to cpu"
REASONS = {
    f"engine/round.py _summarize_turns: {COPY}": "what the round has measured, all at once",
    f"engine/backends/programs.py Program.run: {COPY}": "which clients leave a phase out",
    f"engine/backends/programs.py Program._take_records: {COPY}": "samples kept of each step",
}
"""Why the host waits in a round, apart from hooks that are called client by client and may branch."""


def play_first(method, engine, local=LOCAL, cohort=COHORTS[0], federation=None, net=None):
    """Play a round on the GPU, of which `seen` then tells."""
    federation, net = federation or make_federation().to(GPU), net or tiny()
    runner = make_backend(engine, net, GPU)
    state = make_initial_state(method, net, federation.clients, GPU)
    seen.reset()
    play_round(RoundSetup(runner, method, federation, local, 0), state, cohort)


@pytest.fixture(autouse=True)
def fresh():
    """Nothing counted, no limit, no graph that a failed test has left open."""
    seen.reset()
    seen.limit, Graph.current = 0, None


def played(method, device, engine, norm=False):
    """The state after some rounds, evaluations, and the host waits of the last round by place."""
    net, federation = tiny(norm), make_federation().to(device)
    runner, state = make_backend(engine, net, device), make_initial_state(method, net, 10, device)
    for cohort in (*COHORTS, COHORTS[0]):
        seen.waits.clear()
        state, _ = play_round(RoundSetup(runner, method, federation, LOCAL, 0), state, cohort)
    waits, adapt = Counter(seen.waits), FineTuning(LOCAL, Draws(0, "adapt", 1))
    tunings = (None, FineTuning(LOCAL, Draws(0, "finetune", 1)))
    counts = [
        runner.evaluate(EvalCall(method, federation, state, EVERYONE, tuning, adapt))
        for tuning in tunings
    ]
    assert {leaf.device for leaf in flatten(state).values()} == {device}
    return {"state": tree.to(flatten(state), CPU), "counts": dict(enumerate(counts))}, waits


@pytest.mark.parametrize("norm", keep_quick([False, True]))
@every_method(quick=("fedobp",))
def test_captured_steps_give_what_the_cpu_gives_and_the_host_waits_a_dozen_times(
    name, values, norm
):
    method = METHODS[name](**values)
    there, waits = played(method, GPU, Engine("batched", graphs=True), norm)
    captures, replays = seen.captures, seen.replays
    here, _ = played(method, CPU, Engine("batched"), norm)
    assert_close(there, here)
    assert captures
    assert replays >= captures
    own = {place: count for place, count in waits.items() if not place.startswith("methods/")}
    assert set(own) <= set(REASONS)
    turns = len(method.turns(len(COHORTS), COHORTS[0], 10, generator(0, "turns", len(COHORTS) + 1)))
    assert sum(own.values()) <= 12 * turns


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("method", [FedSelect(p=0.5), PFedMe(inner_steps=1)])
def test_no_step_makes_the_host_wait(method, graphs):
    waits = []
    for epochs in (1, 3):
        local = dataclasses.replace(LOCAL, epochs=epochs)
        play_first(method, Engine("batched", graphs=graphs), local, [0, 3])
        waits.append(Counter(seen.waits))
    assert waits[0] == waits[1]


def test_an_evaluation_is_fetched_at_once():
    federation, net = make_federation().to(GPU), tiny()
    runner = make_backend(Engine("batched"), net, GPU)
    state = make_initial_state(FedAvg(), net, 10, GPU)
    seen.reset()
    counts = runner.evaluate(EvalCall(FedAvg(), federation, state, EVERYONE))
    assert summarize_scores(counts)["accuracy"] > 0
    assert not non_finite_clients(counts)
    assert len(scores_per_client(counts)["accuracy"]) == 10
    assert seen.waits == {
        "engine/backends/backend.py Backend.evaluate_splits: copy from cuda to cpu": 1
    }


@pytest.mark.full
def test_another_device_than_the_current_one_trains_the_same():
    engine = Engine("batched", graphs=True)
    here, there = (played(FedAvg(), device, engine)[0] for device in (GPU, OTHER))
    assert_same(here, there)
    assert seen.replays


@dataclasses.dataclass(frozen=True)
class Careless(FedAvg):
    """Sends a number to the device in every step, which no capture allows."""

    def loss(self, server, client, net, params, batch):
        half = torch.tensor(0.5, device=batch.y.device)
        return super().loss(server, client, net, params, batch) * half


def test_where_a_capture_fails_the_run_goes_on_eagerly_with_one_line(caplog):
    stream = torch.cuda.current_stream(GPU)
    with caplog.at_level(logging.WARNING):
        there, _ = played(Careless(), GPU, Engine("batched", graphs=True))
    assert_close(there, played(Careless(), CPU, Engine("batched"))[0])
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("engine.graphs: a step could not be captured, so steps run eagerly")
    assert torch.cuda.current_stream(GPU) is stream
    assert not seen.captures


@dataclasses.dataclass(frozen=True)
class Watcher(FedAvg):
    """Writes down the flags that are in force in its steps."""

    found: ClassVar[list] = []

    def loss(self, server, client, net, params, batch):
        self.found.append(flags())
        return super().loss(server, client, net, params, batch)


def flags():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    precisions = [part.fp32_precision for part in (matmul, cudnn.conv, cudnn.rnn)]
    return (*precisions, cudnn.deterministic, cudnn.benchmark)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_flags_of_a_backend_hold_while_it_runs(backend):
    """In a lockstep sweep runs of other precisions are made before the first one trains."""
    before = flags()
    make_backend(Engine(backend, precision="tf32"), tiny(), GPU)
    for precision, products in (("fp32", "ieee"), ("tf32", "tf32")):
        Watcher.found.clear()
        play_first(Watcher(), Engine(backend, precision=precision))
        assert set(Watcher.found) == {(products, products, products, True, False)}
        assert flags() == before


def test_a_sweep_takes_lockstep_by_itself(tmp_path):
    result = run_command("-m", *TINY, "method=fedavg,ditto", cwd=tmp_path)
    assert result.code == 0, result.err
    for log in tmp_path.rglob("run.log"):
        assert "engine batched in lockstep on cuda" in log.read_text()


def peak(run):
    """What a call holds at most, beyond what is held before."""
    gc.collect()
    before = seen.peak = seen.now
    run()
    return seen.peak - before


@pytest.mark.full
def test_programs_that_are_kept_make_room_for_what_has_none():
    federation, net = make_federation((20,) * 10, (100,) * 10).to(GPU), tiny()
    runner = make_backend(Engine("batched", graphs=True), net, GPU)
    judge = EvalCall(FedAvg(), federation, make_initial_state(FedAvg(), net, 10, GPU), EVERYONE)
    needed = peak(lambda: runner.run([judge]))
    for method in (FedAvg(), *(Ditto(lam=k / 10) for k in range(1, 7))):
        state = make_initial_state(method, net, 10, GPU)
        train = TrainCall(method, federation, state, EVERYONE, LOCAL, Draws(0, "train", 1))
        runner.run([train])
    made = [program._job.start for _, program in runner._programs._programs]
    kept = 2 * sum(map(tree.nbytes, made))  # the models and their momentum
    seen.limit = seen.now + needed - kept // 2
    (answer,) = runner.run([judge])
    assert not isinstance(answer, Exception)
    assert not runner._programs._programs
    seen.limit = seen.captures = 0
    runner.run([train])
    assert seen.captures  # anew, once all are dropped
    assert not runner._programs._capture.has_failed


def test_indices_are_sent_without_a_wait_and_small_tensors_fetched_with_one():
    flags, counts = torch.tensor([True, False, True]), 2**52 + torch.arange(3)
    values = {"a": torch.rand(3), "b": {"c": flags, "d": counts}}
    there, index = tree.to(values, GPU), torch.tensor([2, 0])
    seen.reset()
    taken = tree.take(there, index)
    tree.put_(there, index, taken)
    assert not seen.waits
    found = tree.fetch({**taken, "here": index})
    assert sum(seen.waits.values()) == 1
    assert_same(found, {**tree.take(values, index), "here": index})


def test_the_pretended_gpu_refuses_what_a_gpu_refuses():
    here, there = torch.ones(3, device=GPU), torch.ones(3, device=OTHER)
    for other in (there, torch.ones(3)):
        with pytest.raises(Refused, match="Expected all tensors to be on the same device"):
            here + other
    assert float((here + torch.tensor(1.0)).sum()) == 6
    assert seen.waits == {"elsewhere: _local_scalar_dense": 1}
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        here.numpy()


def captured(step, warm=True):
    stream, graph = torch.cuda.Stream(GPU), torch.cuda.CUDAGraph()
    if warm:
        with torch.cuda.stream(stream):
            step()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def test_the_pretended_gpu_replays_what_was_captured():
    here, kept = torch.ones(3, device=GPU), []
    graph = captured(lambda: here.mul_(2))
    assert here.tolist() == [2, 2, 2]  # by the warm-up; a capture runs nothing
    graph.replay()
    assert here.tolist() == [4, 4, 4]
    with pytest.raises(Refused, match="nothing has run on this stream"):
        captured(lambda: here.mul_(2), warm=False)
    wait = lambda: torch.cuda.is_current_stream_capturing() and float(here.sum())  # noqa: E731
    with pytest.raises(Refused, match="previous error during capture"):
        captured(lambda: wait() or here.mul_(2))
    with pytest.raises(Refused, match="held after it"):
        captured(lambda: kept.append(here * 2)).replay()
    other = [torch.ones(3, device=GPU)]
    graph = captured(lambda: here.add_(other[0]))
    other.clear()
    with pytest.raises(Refused, match="reads memory that is free"):
        graph.replay()
