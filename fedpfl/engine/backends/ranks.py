"""One run on several processes: `torchrun --nproc_per_node=2 -m fedpfl.train ...`.

Every process plays the same rounds. Where the engine calls its backend, the clients are dealt to
the processes, each answers for its own, and all answers go to all processes, so that each goes on
with the same state. A client's answer does not depend on the process that gives it: on the loop backend
the run is that of one process, bit for bit.

Forms of answers and errors travel through gloo. A process that dies closes its connections, which
ends the waiting of the rest; a machine that is gone is noticed after PATIENCE. Tensors on GPUs
travel through NCCL, after all processes have answered.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from fedpfl.data import fingerprint
from fedpfl.engine.backends.backend import Backend, Engine
from fedpfl.engine.calls import Answer, Call, estimate_work, select_clients
from fedpfl.ground import interrupts, tree
from fedpfl.ground.errors import FedpflError, error_text, original_error
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method

T = TypeVar("T")

PATIENCE = timedelta(hours=2)  # for processes that still train
PRECEDENCE = 2.0  # seconds in which process 0 alone may report an error

_store: list[dist.Store] = []


def is_launched_by_torchrun() -> bool:
    """Check whether torchrun started several processes; a RANK without it means nothing."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


def local_rank_and_size() -> tuple[int, int]:
    """Return this process's number on its machine, and how many there are."""
    if not is_launched_by_torchrun():
        return 0, 1
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def available_cores() -> int:
    """Return this process's share of the cores that processes on this machine may use."""
    if hasattr(os, "sched_getaffinity"):
        core_count = len(os.sched_getaffinity(0))
    else:
        core_count = os.cpu_count() or 1
    return max(1, core_count // local_rank_and_size()[1])


def is_main_process() -> bool:
    """Check whether this is the process that writes: process 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def join_process_group() -> None:
    """Meet the other processes, if there are any. What those beside process 0 print is dropped."""
    if not is_launched_by_torchrun():
        return
    store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
    kinds = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(kinds, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    _store[:] = [store]
    # torchrun has set it to 1; on a CPU the loop backend will, too.
    torch.set_num_threads(available_cores())
    if rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def leave_process_group() -> None:
    """Leave the process group after a run without errors."""
    if dist.is_initialized():
        dist.destroy_process_group()


def should_report_error() -> bool:
    """Check whether this process, alone of all, reports an error.

    It is process 0 if it has something to report. Nothing interrupts a process that has asked.
    """
    if not dist.is_initialized():
        return True
    interrupts.ignore_signals()
    try:
        deadline = time.monotonic() + (0 if is_main_process() else PRECEDENCE)
        while time.monotonic() < deadline and not _store[0].check(["told"]):
            time.sleep(0.05)
        return _store[0].add("told", 1) == 1
    except RuntimeError:
        # torchrun is gone, or the machine that all meet at: one process of each machine reports.
        return local_rank_and_size()[0] == 0


def require_same_facts(**facts: Any) -> None:
    """Raise FedpflError, the same in all processes, where one has other facts than process 0."""
    if not dist.is_initialized():
        return
    facts_by_rank = _gather_values(facts)
    expected = facts_by_rank[0]
    for rank, rank_facts in enumerate(facts_by_rank):
        for name, value in rank_facts.items():
            if value != expected[name]:
                raise FedpflError(
                    f"process {rank} has {name} {value}, process 0 {expected[name]}; give all"
                    " the same command, files and packages"
                )


def broadcast_value(value: T) -> T:
    """Return process 0's value, a tree of CPU tensors and plain values, in all processes."""
    if not dist.is_initialized():
        return value
    values = [value if is_main_process() else None]
    with _ending_if_unreachable():
        dist.broadcast_object_list(values)
    return cast(T, values[0])


def broadcast_each(values: Sequence[T]) -> Iterator[T]:
    """Yield process 0's values in all processes, one value at a time."""
    for position in range(broadcast_value(len(values))):
        yield broadcast_value(tree.to(values[position], "cpu") if values else cast(T, None))


def distribute_backend(backend: Backend, device: torch.device) -> Backend:
    """Return the backend of all processes together; `backend` itself in a single process."""
    return DistributedBackend(backend, device) if dist.is_initialized() else backend


def assign_clients(loads: Sequence[float], ranks: int) -> list[int]:
    """Return the process of each client, which take turns from the largest load on."""
    owners = [0] * len(loads)
    for turn, client in enumerate(sorted(range(len(loads)), key=lambda client: -loads[client])):
        owners[client] = turn % ranks
    return owners


def error_frames(error: BaseException) -> list[tuple[str, str, int]]:
    """Return where an error has passed, outermost first: file, function, line.

    Also of an error from another process.
    """
    remote_frames = getattr(error, "frames", None)
    if remote_frames:
        return remote_frames
    frames = []
    for frame, line in traceback.walk_tb(original_error(error).__traceback__):
        frames.append((frame.f_code.co_filename, frame.f_code.co_qualname, line))
    return frames


def find_blamed_hook(error: BaseException, method: type[Method]) -> tuple[str, str] | None:
    """Return the function of a method that led to an error, and its `file:line`.

    None where no function of the method is in the traceback.

    Its files are those of its class and of methods that it derives from.
    """
    kinds = [kind for kind in method.__mro__ if issubclass(kind, Method) and kind is not Method]
    files = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds}
    calls = [(name, f"{file}:{line}") for file, name, line in error_frames(error) if file in files]
    return (calls[0][0], calls[-1][1]) if calls else None


class DistributedBackend(Backend):
    """Have every process answer for some clients of a call, and exchange the answers."""

    def __init__(self, backend: Backend, device: torch.device):
        self._backend = backend
        self._device = device
        self.net = backend.net
        self.name = f"{backend.name} in {dist.get_world_size()} processes"
        if device.type == "cuda":
            torch.cuda.set_device(device)

    @property
    def engine(self) -> Engine:  # type: ignore[override]
        """That of this process's own backend."""
        return self._backend.engine

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend. What went wrong in one process is the answer in all."""
        return [self._run_call(call) for call in calls]

    def _run_call(self, call: Call) -> Answer:
        """Run this process's clients, and exchange the results."""
        # ---- Step 1: this process's own clients
        positions_by_rank = _deal_clients(call)
        local_positions = positions_by_rank[dist.get_rank()]
        local_rows: Any = None
        failed: Exception | None = None
        message: Any = None  # the rows' form, an error, or None without any client
        try:
            if local_positions:
                local_rows = self._backend.run_one(select_clients(call, local_positions))
                message = tree.map(_without_rows, local_rows)
        except Exception as error:
            failed = error
            message = _picklable_error(error)

        # ---- Step 2: has any failed, and do all mean the same?
        messages = []
        digests = []
        for rank_message, digest in _gather_values((message, fingerprint(call.state.server))):
            messages.append(rank_message)
            digests.append(digest)
        for rank_message in messages:
            if isinstance(rank_message, Exception):
                return failed or rank_message
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                return FedpflError(
                    f"after round {call.state.round} process {rank} has another server state than"
                    " process 0; take processors of one kind, which round alike"
                )
        forms = [form for form in messages if form is not None]
        if any(tree.specs(form) != tree.specs(forms[0]) for form in forms):
            return FedpflError(
                f"{type(call.method).__name__} brings back trees of different forms from its"
                " clients"
            )

        # ---- Step 3: the rows of all
        return self._gather_rows(forms[0], positions_by_rank, local_rows)

    def _gather_rows(self, form: Tree, positions_by_rank: list[list[int]], local_rows: Tree) -> Any:
        """Gather the rows of all processes in the order of the call."""
        row_count = sum(map(len, positions_by_rank))
        all_rows = tree.map(
            lambda leaf: leaf.new_empty((row_count, *leaf.shape[1:]), device=self._device), form
        )
        for rank, positions in enumerate(positions_by_rank):
            if positions:
                exchange = partial(self._exchange_rows, rank, torch.tensor(positions))
                own_rows = [local_rows] if rank == dist.get_rank() else []
                tree.map(exchange, all_rows, *own_rows)
        return all_rows

    def _exchange_rows(
        self, rank: int, rows: Tensor, leaf: Tensor, own: Tensor | None = None
    ) -> None:
        """Write the rows of one process into a leaf of all processes."""
        if own is None:
            values = leaf.new_empty(len(rows), *leaf.shape[1:])
        else:
            values = own.to(self._device).contiguous()
        if values.numel():
            with _ending_if_unreachable():
                dist.broadcast(values.view(-1).view(torch.uint8), rank)
        leaf[rows.to(self._device)] = values


def _deal_clients(call: Call) -> list[list[int]]:
    """Return the positions of each process's clients in a call, by rank."""
    world_size = dist.get_world_size()
    work = [estimate_work(call, client) for client in call.clients]
    owners = assign_clients(work, world_size)
    positions_by_rank: list[list[int]] = [[] for _ in range(world_size)]
    for position, owner in enumerate(owners):
        positions_by_rank[owner].append(position)
    return positions_by_rank


def _without_rows(leaf: Tensor) -> Tensor:
    return leaf.new_empty((0, *leaf.shape[1:]), device="meta")


@contextlib.contextmanager
def _ending_if_unreachable() -> Iterator[None]:
    """Raise KeyboardInterrupt where another process has gone, which alone knows why."""
    try:
        yield
    except RuntimeError as error:
        # Before and behind it is what might help PyTorch's authors.
        reason = re.sub(r"^\[\S*\] ", "", error_text(error)).partition(". ")[0]
        raise KeyboardInterrupt(
            f"another process of the run cannot be reached ({reason})"
        ) from error


def _gather_values(value: Any) -> list[Any]:
    """Return the values of all processes in all, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    with _ending_if_unreachable():
        dist.all_gather_object(values, value)
    return values


def _picklable_error(error: Exception) -> Exception:
    """Return an error as other processes can show it."""
    try:
        # Both ways, as an error may be pickled and not be made again.
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.frames = error_frames(error)
    copy.add_note("".join(["in another process:\n", *traceback.format_exception(error)]))
    return copy
