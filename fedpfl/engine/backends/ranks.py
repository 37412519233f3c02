"""One run on several processes: `torchrun --nproc_per_node=2 -m fedpfl.train ...`.

Every process plays the same rounds. Where the engine calls its backend, the clients are dealt to
the processes, each answers for its own, and all answers go to all processes, so that each goes on
with the same state. What a client's
answer is does not depend on who gives it: on the loop backend the run is that of one process, bit
for bit.

Forms of answers, and what went wrong, travel through gloo; a process that dies closes its
connections, which ends the others' waiting at once. A machine that is gone closes none: the kernel
asks after it and closes them in its place. Tensors on GPUs travel through NCCL, once everybody is
there.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import socket
import stat
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from fedpfl.data import fingerprint
from fedpfl.engine.backends.backend import Backend, Engine
from fedpfl.engine.calls import Answer, Call, estimate_work
from fedpfl.ground import interrupts, tree
from fedpfl.ground.errors import FedpflError, error_text, original_error
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method

T = TypeVar("T")

PATIENCE = timedelta(days=1)  # for those who still train; a death is noticed without it
SILENCE = 30  # seconds without a sign of life from another machine after which it is gone
PRECEDENCE = 2.0  # seconds that process 0 has to tell what is wrong before others do

_store: list[dist.Store] = []


def is_launched_by_torchrun() -> bool:
    """Return whether torchrun has started this process and others; a RANK without it means nothing."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


def local_rank_and_size() -> tuple[int, int]:
    """Return this process's number on its machine, and how many there are."""
    return (
        (int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        if is_launched_by_torchrun()
        else (0, 1)
    )


def available_cores() -> int:
    """Return this process's share of the cores that processes on this machine may use."""
    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, usable // local_rank_and_size()[1])


def is_main_process() -> bool:
    """Return whether this is the process that writes: process 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def join_process_group() -> None:
    """Meet the other processes, if there are any. What those beside process 0 print is dropped."""
    if not is_launched_by_torchrun():
        return
    store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
    kinds = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(kinds, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    _store[:] = [store]
    _watch()
    torch.set_num_threads(
        available_cores()
    )  # torchrun has set it to 1; on a CPU the loop backend will, too
    if rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _watch() -> None:
    """Have the kernel watch this process's connections, as gloo and torchrun's store do not.

    One breaks where the other machine does not answer for SILENCE seconds, be it while both are
    waiting (keep-alive) or while something is on its way (user timeout).
    """
    values = {"TCP_KEEPIDLE": SILENCE // 3, "TCP_KEEPINTVL": SILENCE // 6, "TCP_KEEPCNT": 4}
    values["TCP_USER_TIMEOUT"] = 1000 * SILENCE
    for own in _connections():
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in values.items():
            if hasattr(socket, name):  # Linux has all
                own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _connections() -> Iterator[socket.socket]:
    """Give this process's connections by TCP, whichever library has opened them."""
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        with contextlib.suppress(OSError):  # closed since
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as own:
                if (
                    own.family in (socket.AF_INET, socket.AF_INET6)
                    and own.type == socket.SOCK_STREAM
                ):
                    yield own


def leave_process_group() -> None:
    """Leave the others, after a run that went well."""
    if dist.is_initialized():
        dist.destroy_process_group()


def should_report_error() -> bool:
    """Return whether it is this process that says what went wrong: one does, process 0 where it has
    something to say.

    Nothing interrupts a process that has asked.
    """
    if not dist.is_initialized():
        return True
    interrupts.ignore_signals()
    try:
        until = time.monotonic() + (0 if is_main_process() else PRECEDENCE)
        while time.monotonic() < until and not _store[0].check(["told"]):
            time.sleep(0.05)
        return _store[0].add("told", 1) == 1
    except (
        RuntimeError
    ):  # torchrun is gone, or the machine that all meet at: one process of each machine tells
        return local_rank_and_size()[0] == 0


def require_same_facts(**facts: Any) -> None:
    """Raise FedpflError, the same in all processes, where one has other facts than process 0."""
    if not dist.is_initialized():
        return
    for number, own in enumerate(everyone := _everyones(facts)):
        for name, value in own.items():
            if value != everyone[0][name]:
                raise FedpflError(
                    f"process {number} has {name} {value}, process 0 {everyone[0][name]}; give all"
                    " the same command, files and packages"
                )


def is_stored_here(client: int) -> bool:
    """Return whether a client's state is stored here, where states are sharded."""
    return not dist.is_initialized() or client % dist.get_world_size() == dist.get_rank()


def broadcast_value(value: T, source: int = 0) -> T:
    """Return one process's value, a tree of CPU tensors and plain values, in all; the others' are
    not looked at.
    """
    if not dist.is_initialized():
        return value
    gives = dist.get_rank() == source
    told = [
        (
            tree.map(lambda leaf: _Form.of(leaf) if isinstance(leaf, Tensor) else leaf, value)
            if gives
            else None
        )
    ]
    with _together():
        dist.broadcast_object_list(told, source)

    def sent(form: Any, *own: Any) -> Any:
        if not isinstance(form, _Form):
            return form
        leaf = own[0].contiguous() if own else form.empty(torch.device("cpu"))
        _broadcast(_raw(leaf), source)
        return leaf

    return tree.map(sent, told[0], *([value] if gives else []))


def broadcast_each(values: Sequence[T], source: int = 0) -> Iterator[T]:
    """Give one process's values in all, one after another, so that none holds more than it keeps."""
    for place in range(broadcast_value(len(values), source)):
        yield broadcast_value(
            tree.to(values[place], "cpu") if place < len(values) else values, source
        )  # type: ignore[misc]


def gather_to_main(values: Sequence[T]) -> list[T]:
    """Return the values of all processes in process 0."""
    sources = range(dist.get_world_size() if dist.is_initialized() else 1)
    return [
        value for source in sources for value in broadcast_each(values, source) if is_main_process()
    ]


def distribute_backend(backend: Backend, device: torch.device) -> Backend:
    """Return the backend of all processes together; `backend` itself where there is only this one."""
    return DistributedBackend(backend, device) if dist.is_initialized() else backend


def assign_clients(loads: Sequence[float], ranks: int) -> list[int]:
    """Return who takes each client: the largest first, each to who has least to do; numbers break
    ties.
    """
    owners, dealt = [0] * len(loads), [(0.0, 0, rank) for rank in range(ranks)]
    for place in sorted(range(len(loads)), key=lambda place: -loads[place]):
        load, clients, owner = min(dealt)
        dealt[owner] = (load + loads[place], clients + 1, owner)
        owners[place] = owner
    return owners


def error_frames(error: BaseException) -> list[tuple[str, str, int]]:
    """Return where an error has passed, outermost first: file, function, line. Also of one from
    another process.
    """
    here = (
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(original_error(error).__traceback__)
    )
    return getattr(error, "frames", None) or [
        (code.co_filename, code.co_qualname, line) for code, line in here
    ]


def find_blamed_hook(error: BaseException, method: type[Method]) -> tuple[str, str] | None:
    """Return which function of a method's files has led to an error, and the last place there as
    `file:line`, or None.

    The files are those of its class and of methods that it derives from.
    """
    kinds = [kind for kind in method.__mro__ if issubclass(kind, Method) and kind is not Method]
    files = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds}
    calls = [(name, f"{file}:{line}") for file, name, line in error_frames(error) if file in files]
    return (calls[0][0], calls[-1][1]) if calls else None


class DistributedBackend(Backend):
    """Every process answers for some clients of a call, by a backend of its own, and hears of the
    others.
    """

    def __init__(self, backend: Backend, device: torch.device):
        self._backend, self._device, self.net = backend, device, backend.net
        self.name = f"{backend.name} in {dist.get_world_size()} processes"
        if device.type == "cuda":
            torch.cuda.set_device(device)

    @property
    def engine(self) -> Engine:  # type: ignore[override]
        """That of this process's own backend."""
        return self._backend.engine

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend. What went wrong in one process is the answer in all."""
        return [self._answer(call) for call in calls]

    def _answer(self, call: Call) -> Answer:
        if call.state.rows.is_stored_here:
            owners = [client % dist.get_world_size() for client in call.clients]
        else:
            owners = assign_clients(
                [estimate_work(call, client) for client in call.clients], dist.get_world_size()
            )
        dealt: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        for place, owner in enumerate(owners):
            dealt[owner].append(place)
        here, mine, failed = dealt[dist.get_rank()], None, None
        try:
            mine = self._backend.run_one(_some(call, here)) if here else None
        except Exception as error:
            failed = error
        said = (
            _picklable_error(failed)
            if failed
            else tree.map(_Form.of, tree.take(mine, 0))
            if here
            else None
        )
        told, digests = zip(*_everyones((said, fingerprint(call.state.server))), strict=True)
        if failure := next((own for own in told if isinstance(own, Exception)), None):
            return failed or failure
        if parted := next(
            (rank for rank, digest in enumerate(digests) if digest != digests[0]), None
        ):
            return FedpflError(
                f"after round {call.state.round} process {parted} has another server state than"
                " process 0; take processors of one kind, which round alike"
            )
        forms = [form for form in told if form is not None]
        if any(form != forms[0] for form in forms):  # in whatever order
            return FedpflError(
                f"{type(call.method).__name__} brings back trees of different forms from its"
                " clients"
            )
        return self._gathered(forms[0], dealt, mine)

    def _gathered(self, form: Tree, dealt: list[list[int]], mine: Tree) -> Any:
        """Return the whole answer, of which each process has some rows; one buffer travels from
        each.
        """
        whole = tree.map(lambda row: row.empty(self._device, sum(map(len, dealt))), form)
        leaves = _by_size(whole)
        for rank, places in enumerate(dealt):
            sizes = [len(places) * leaf[0].nbytes for leaf in leaves]
            if not sum(sizes):
                continue
            if rank == dist.get_rank():
                own = _by_size(
                    tree.map(lambda _, leaf: leaf.to(self._device), form, mine)
                )  # in the form's order
                buffer = torch.cat([_raw(leaf) for leaf in own])
            else:
                buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            _broadcast(buffer, rank)
            rows = torch.tensor(places, device=self._device)
            for leaf, piece in zip(leaves, buffer.split(sizes), strict=True):
                leaf[rows] = piece.view(leaf.dtype).view(len(places), *leaf.shape[1:])
        return whole


def _some(call: Call, places: list[int]) -> Call:
    """Return the call about some of its clients."""
    laid = None if call.overlay is None else tree.take(call.overlay, torch.tensor(places))
    return replace(call, clients=[call.clients[place] for place in places], overlay=laid)


@dataclass(frozen=True)
class _Form:
    """What a tensor is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, leaf: Tensor) -> _Form:
        return cls(tuple(leaf.shape), leaf.dtype)

    def empty(self, device: torch.device, *rows: int) -> Tensor:
        """Make one, or so many stacked."""
        return torch.empty((*rows, *self.shape), dtype=self.dtype, device=device)


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Raise KeyboardInterrupt where another process has gone, which alone knows why."""
    try:
        yield
    except RuntimeError as error:
        # Before and behind it is what might help PyTorch's authors.
        short = re.sub(r"^\[\S*\] ", "", error_text(error)).partition(". ")[0]
        raise KeyboardInterrupt(
            f"another process of the run cannot be reached ({short})"
        ) from error


def _everyones(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    with _together():
        dist.all_gather_object(found, value)
    return found


def _broadcast(buffer: Tensor, rank: int) -> None:
    if buffer.numel():
        with _together():
            dist.broadcast(buffer, rank)


def _raw(leaf: Tensor) -> Tensor:
    """Return a tensor's bytes, `[nbytes]`, without a copy where it is contiguous."""
    return leaf.contiguous().view(-1).view(torch.uint8)


def _by_size(stacked: Tree) -> list[Tensor]:
    """Return leaves, those of the largest elements first, so that in a buffer each begins where its
    type may.
    """
    return sorted(tree.leaves(stacked), key=lambda leaf: -leaf.element_size())


def _picklable_error(error: Exception) -> Exception:
    """Return an error as other processes can show it."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.frames = error_frames(error)
    copy.add_note("".join(["in another process:\n", *traceback.format_exception(error)]))
    return copy
