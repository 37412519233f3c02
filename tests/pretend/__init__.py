"""A pretended GPU: with `pytest -p tests.pretend` a CPU build of PyTorch believes in `cuda:0` and
`cuda:1`.

Every operation has its true values, computed on the CPU. What CUDA refuses is refused (operands on
two devices; host waits and transfers while a graph is captured; a graph that reads freed memory),
what makes the host wait is counted by its place, and graphs replay what was recorded, from the
memory that it was recorded with, Python left out. It shows nothing of cuDNN, of races between
streams, or of time.

It has to be there before torch is, and needs a C++ compiler once, for `guard.cpp`.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time
import warnings
import weakref
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent


def _guard() -> ctypes.CDLL:
    """Compile `guard.cpp` unless that was done before, and load it ahead of torch."""
    assert "torch" not in sys.modules, (
        "a GPU is pretended before torch is imported: pytest -p tests.pretend"
    )
    source, root = HERE / "guard.cpp", Path(importlib.util.find_spec("torch").origin).parent
    version = importlib.metadata.version("torch")
    name = hashlib.sha256(f"{root} {version}".encode() + source.read_bytes()).hexdigest()[:16]
    built = HERE.parents[1] / ".pytest_cache" / f"guard-{name}.so"
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        new = built.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{root}/include"]
        flags += [f"-L{root}/lib", f"-Wl,-rpath,{root}/lib"]
        subprocess.run(["c++", *flags, source, "-o", new, "-lc10", "-ltorch_cpu"], check=True)
        os.replace(new, built)
    return ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)


guard = _guard()
guard.install()

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  it looks at torch.cuda's functions, which are replaced below
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

WAITS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique_dim", "_unique2"),
    *("equal", "multinomial", "linalg_eigh", "_linalg_eigh", "_linalg_svd", "_linalg_check_errors"),
}
"""Operations whose CUDA kernels wait for the device, for the size of their result or LAPACK's word.
"""

IN_ANY_ORDER = {"index_add", "index_add_", "scatter_add", "scatter_add_", "index_reduce"}
"""Operations that add on CUDA by atomics: floats that meet differ from run to run."""

INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
# 0-dimensional CPU tensors
WITH_SCALARS = {"fill_", "masked_fill", "masked_fill_", "index_put", "index_put_", "where"}
EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


class Refused(RuntimeError):
    """What CUDA would refuse."""


class Seen:
    """What happened since `reset`: host waits by place, graphs, memory.

    limit: of memory; 0 is none.
    """

    now = limit = 0

    def reset(self) -> None:
        self.waits: collections.Counter[str] = collections.Counter()
        self.captures = self.replays = 0
        self.peak = self.now


PACKAGE = f"{Path(importlib.util.find_spec('fedpfl').origin).parent}/"
"""Where the project's code lies; a clone may have the same name."""

seen = Seen()
seen.reset()


def place() -> str:
    """The innermost function of the project on the way here, `engine/round.py play`."""
    frame: Any = sys._getframe()
    while frame := frame.f_back:
        file = frame.f_code.co_filename.removeprefix(PACKAGE)
        if file != frame.f_code.co_filename and file != "ground/tree.py":
            return f"{file} {frame.f_code.co_qualname.partition('.<locals>')[0]}"
    return "elsewhere"


_live: dict[int, list[int]] = {}  # storages in use: how many tensors hold them, bytes


def _hold(tensor: Gpu) -> None:
    storage = tensor.inner.untyped_storage()
    key, size = storage._cdata, storage.nbytes()
    if key not in _live:
        if seen.limit and seen.now + size > seen.limit:
            told = f"CUDA out of memory: {seen.now} + {size} of {seen.limit} bytes"
            raise torch.OutOfMemoryError(told)
        _live[key] = [0, size]
        seen.now += size
        seen.peak = max(seen.peak, seen.now)
    _live[key][0] += 1
    weakref.finalize(tensor, _let_go, key)


def _let_go(key: int) -> None:
    _live[key][0] -= 1
    if not _live[key][0]:
        seen.now -= _live.pop(key)[1]


class Gpu(torch.Tensor):
    """A tensor that says it is on a GPU; its values are in `inner`."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int) -> Gpu:
        form = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        device = torch.device("cuda", index)
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), device=device, dtype=inner.dtype, **form
        )

    def __init__(self, inner: torch.Tensor, index: int):
        self.inner = inner
        _hold(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"{self.inner!r} on {self.device}"

    def tolist(self) -> Any:
        _wait("tolist")
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait("saved")
        return self.inner.__reduce_ex__(protocol)


def _storage(inner: torch.Tensor) -> int:
    return inner.untyped_storage()._cdata


class Stream:
    """A stream of a device; used: whether anything ran on it."""

    def __init__(self, device: Any = None, **_: Any):
        index = torch.device("cuda" if device is None else device).index
        self.device = torch.device("cuda", guard.exchange(-1) if index is None else index)
        self.used = False

    def wait_stream(self, other: Stream) -> None:
        pass

    synchronize = wait_event = record_event = wait_stream


_streams = {index: Stream(index) for index in range(2)}  # the current one of each device


class OnStream:
    """`torch.cuda.stream`: makes a stream current, and its device."""

    def __init__(self, stream: Stream):
        self.stream = stream

    def __enter__(self) -> None:
        index = self.stream.device.index
        self.before = guard.exchange(index), _streams[index]
        _streams[index] = self.stream

    def __exit__(self, *_: Any) -> None:
        device, _streams[self.stream.device.index] = self.before
        guard.exchange(device)


_graphs_of_pool: collections.Counter[Any] = collections.Counter()


class Graph:
    """Records what runs on the device that is current when a capture begins, and does it again."""

    current: Graph | None = None

    def __init__(self, **_: Any):
        self.records: list[tuple[Any, Any, Any, list[torch.Tensor] | None]] = []
        self.made: dict[int, str] = {}  # storages made during the capture, and where
        # Others that were read, and where first; their contents from before the capture.
        self.read: dict[int, tuple[torch.Tensor, str]] = {}
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.broken = self.replayed = False

    def capture_begin(self, pool: Any = None, **_: Any) -> None:
        assert Graph.current is None
        if _graphs_of_pool.get(pool) == 0:
            raise Refused("use_count > 0 INTERNAL ASSERT FAILED: no graph of this pool is left")
        _graphs_of_pool[pool] += 1
        weakref.finalize(self, _graphs_of_pool.subtract, [pool])
        self.index = guard.exchange(-1)
        if not _streams[self.index].used:
            raise Refused("nothing has run on this stream: a capture would set libraries up")
        Graph.current = self

    def capture_end(self) -> None:
        Graph.current = None
        for whole, before in self.written.values():
            whole.copy_(before)
        if self.broken:
            raise Refused("operation failed due to a previous error during capture")
        if not self.records:
            warnings.warn("The CUDA Graph is empty.", stacklevel=2)
        seen.captures += 1

    def add(self, func: Any, args: Any, kwargs: Any, outs: list[torch.Tensor] | None) -> None:
        """Record a call; outs: tensors that it made, where it does not write into given ones."""
        for out in outs or ():
            self.made.setdefault(_storage(out), f"{func} at {place()}")
        if func._schema.name.removeprefix("aten::") not in EMPTY:
            self.records.append((func, args, kwargs, outs))

    def uses(self, inner: torch.Tensor, written: bool) -> None:
        """Note memory from outside the graph."""
        key = _storage(inner)
        if key in self.made:
            return
        self.read.setdefault(key, (inner, place()))
        if written and key not in self.written:
            whole = torch.empty(0, dtype=torch.uint8).set_(inner.untyped_storage())
            self.written[key] = whole, whole.clone()

    def find_outliving(self) -> str:
        """Where something was made in the capture that is still held."""
        return next((where for key, where in self.made.items() if key in _live), "")

    def replay(self) -> None:
        # Whoever captured has let go by now; autograd's threads do a moment later.
        end = time.monotonic() + (not self.replayed)
        while not self.replayed and self.find_outliving() and time.monotonic() < end:
            time.sleep(0.002)
        if not self.replayed and (where := self.find_outliving()):
            raise Refused(f"made in a capture and held after it, to be overwritten: {where}")
        self.replayed = True
        for key, (_, where) in self.read.items():
            if key not in _live:
                raise Refused(f"a graph reads memory that is free, as {where} did first")
        seen.replays += 1
        with torch.no_grad():
            for func, args, kwargs, outs in self.records:
                found = func(*args, **kwargs)
                for out, new in zip(outs or (), _tensors(found) if outs else (), strict=True):
                    out.copy_(new)


def _tensors(values: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _wait(why: str) -> None:
    seen.waits[f"{place()}: {why}"] += 1
    if Graph.current is not None:
        Graph.current.broken = True
        raise Refused(f"operation not permitted when stream is capturing: {why} at {place()}")


@cache
def _writes(func: Any) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    written = ((at, own) for at, own in arguments if own.alias_info and own.alias_info.is_write)
    return [(at, own.name) for at, own in written]


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    return _tensors([args[i] if i < len(args) else kwargs.get(name) for i, name in _writes(func)])


@cache
def _views(func: Any) -> bool:
    named = ("aten::_unsafe_view", "aten::detach", "aten::alias", "aten::lift_fresh")
    aliases = [value.alias_info for value in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return is_view or func._schema.name in named


def _meet(axis: int, index: Any) -> bool:
    """Whether two entries of an index along an axis are the same."""
    axis = axis if index.dim() > 1 else 0
    return bool((index.inner.sort(axis).values.diff(dim=axis) == 0).any())


def _check(name: str, func: Any, args: Any, kwargs: Any, to: torch.device | None) -> None:
    """Refuse what CUDA refuses, and count what makes the host wait."""
    tensors = _tensors((args, kwargs))
    gpus, cpus = ([t for t in tensors if isinstance(t, Gpu) == there] for there in (True, False))
    is_copy = name == "copy_"
    asynchronous = args[2] if is_copy and len(args) > 2 else kwargs.get("non_blocking", False)
    if is_copy and cpus and gpus:
        is_sent = asynchronous and args[1] is cpus[0] and _storage(cpus[0]) in _pinned
        if tensors[0].numel() and not is_sent:
            _wait(f"copy from {args[1].device.type} to {args[0].device.type}")
    elif name in INDEXING and cpus and isinstance(args[0], Gpu):
        _wait("indices on the CPU")
    elif not is_copy and ((cpus and gpus) or any(t.device != gpus[0].device for t in gpus[1:])):
        takes_scalars = torch.Tag.pointwise in func.tags or name in WITH_SCALARS
        if not (cpus and takes_scalars and all(t.dim() == 0 for t in cpus)):
            found = [(*t.shape, str(t.device)) for t in tensors]
            told = "Expected all tensors to be on the same device"
            raise Refused(f"{func}: {told}, found {found} at {place()}")
    if name in IN_ANY_ORDER and tensors[0].is_floating_point() and _meet(args[1], args[2]):
        raise Refused(f"{name} adds floats that meet, in any order, at {place()}")
    if name in WAITS:
        _wait(name)
    elif name in INDEXING and any(
        t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
    ):
        _wait("a mask as an index")
    elif name == "repeat_interleave" and kwargs.get("output_size") is None:
        _wait(name)
    elif name == "_to_copy" and to is not None and to.type == "cpu":
        _wait("copy from cuda to cpu")


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    name, graph = func._schema.name.removeprefix("aten::"), Graph.current
    gpus = [t for t in _tensors((args, kwargs)) if isinstance(t, Gpu)]
    to = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    _check(name, func, args, kwargs, to)
    index = gpus[0].device.index if gpus else guard.exchange(-1)
    if to is not None and to.type == "cuda" and to.index is not None:
        index = to.index
    views = _views(func)
    if not views and name not in EMPTY:
        _streams[index].used |= graph is None
    wrappers = {id(t.inner): t for t in gpus}
    own_args, own_kwargs = tree_map_only(Gpu, lambda t: t.inner, (args, kwargs))
    if to is not None:
        own_kwargs = {**own_kwargs, "device": "cpu"}
    own_kwargs.pop("non_blocking", None)
    recorded = graph is not None and graph.index == index
    writes = _written(func, args, kwargs)
    if graph is not None and recorded:
        for t in gpus:
            graph.uses(t.inner, any(t is own for own in writes))
    found = func(*own_args, **own_kwargs)
    if graph is not None and recorded and not views:
        graph.add(func, own_args, own_kwargs, None if writes else _tensors(found))

    def out(inner: torch.Tensor) -> torch.Tensor:
        if id(inner) in wrappers:
            return wrappers[id(inner)]
        is_here = not gpus if to is None else to.type == "cpu"
        return inner if is_here else Gpu(inner, index)

    return tree_map_only(torch.Tensor, out, found)


def _factory(op: Any) -> Any:
    """An operation that makes a tensor from nothing, on the device."""

    def make(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Any:
        return _run(op, args, {**kwargs, "device": device or "cuda"})

    return make


_library = torch.library.Library("aten", "IMPL")
for _name in (
    *("empty.memory_format", "empty_strided", "full", "zeros", "ones", "scalar_tensor", "eye"),
    *("eye.m", "linspace", "arange", "arange.start", "arange.start_step", "tril_indices"),
    *("randperm", "rand", "randn", "randint"),
):
    _base, _, _overload = _name.partition(".")
    _operation = getattr(getattr(torch.ops.aten, _base), _overload or "default")
    _library.impl(_name, _factory(_operation), "CUDA")

_tensor, _pinned = torch.tensor, set[int]()  # storages in pinned host memory


def _made(data: Any, *, dtype: Any = None, device: Any = None, **rest: Any) -> torch.Tensor:
    """`torch.tensor`, whose own move to the device is not seen."""
    made = _tensor(data, dtype=dtype, **rest)
    return made if device is None else made.to(device)


def _pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    pinned = tensor.clone()
    key = _storage(pinned)
    _pinned.add(key)
    weakref.finalize(pinned, _pinned.discard, key)
    return pinned


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _always(value: Any) -> Any:
    return lambda *_, **__: value


torch.tensor = _made
torch.random._fork_rng_warned_already = True
torch.Tensor.pin_memory = _pin
torch._C._host_emptyCache = _nothing
torch.cuda.amp.common.amp_definitely_not_available = _always(False)


def _memory(*_: Any) -> tuple[int, int]:
    """What is free, and how much there is."""
    whole = seen.limit or 2**34
    return whole - seen.now, whole


_exchanging = ("_exchange_device", "_maybe_exchange_device", "set_device")
_silent = ("_lazy_init", "synchronize", "empty_cache", "set_rng_state", "manual_seed")
_true = ("is_available", "is_initialized", "is_bf16_supported")
_patches: dict[str, Any] = {
    **dict.fromkeys(_exchanging, guard.exchange),
    **dict.fromkeys((*_silent, "manual_seed_all"), _nothing),
    **dict.fromkeys(_true, _always(True)),
    "get_rng_state": _always(_tensor([0], dtype=torch.uint8)),
    "device_count": _always(2),
    "current_device": lambda: guard.exchange(-1),
    "get_device_name": _always("pretended"),
    "graph_pool_handle": object,
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=_memory()[1]),
    "current_stream": lambda device=None: _streams[Stream(device).device.index],
    "is_current_stream_capturing": lambda: Graph.current is not None,
    "mem_get_info": _memory,
    "max_memory_allocated": lambda *_: seen.peak,
    **{"CUDAGraph": Graph, "Stream": Stream, "stream": OnStream},
}
for _attribute, _value in _patches.items():
    setattr(torch.cuda, _attribute, _value)
