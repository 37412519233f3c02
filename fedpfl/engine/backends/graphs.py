"""CUDA graphs: steps that are captured once and replayed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from fedpfl.ground.errors import error_text

log = logging.getLogger(__name__)
Capture = Callable[[Callable[[], None]], Callable[[], None]]
AttemptedCapture = Callable[[Callable[[], None]], Callable[[], None] | None]


class CudaGraphs:
    """Capture steps into CUDA graphs of one device.

    They share one pool of memory, as they are replayed one after another.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._living_graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """Capture what `step` does; return a function that does it again."""
        # The allocator refuses a pool once all its graphs are gone.
        if not self._living_graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                step()
        except Exception:
            self._abandon_pool()
            raise
        self._living_graphs.add(graph)
        return graph.replay

    def _abandon_pool(self) -> None:
        """Have the next capture take another pool."""
        self._living_graphs.clear()
        # Before torch 2.13 a failed capture may leave the allocator serving it; where it does not,
        # there is nothing to end, which is an error.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._stream.device.index, self._pool)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Run the body on the device and stream of the captures, which warms it up."""
        stream_before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(stream_before)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            stream_before.wait_stream(self._stream)


class CaptureAttempts:
    """Capture steps, until one cannot be captured.

    Args:
        capture: See `ProgramCache`.
    """

    def __init__(self, capture: Capture):
        self._capture = capture
        self.has_failed = False

    def __call__(self, step: Callable[[], None]) -> Callable[[], None] | None:
        """Capture a step; return None from the first failure on.

        Raises:
            torch.OutOfMemoryError: There is no room; fewer clients may fit.
        """
        if self.has_failed:
            return None
        try:
            return self._capture(step)
        except Exception as error:
            memory_error = _find_memory_error(error)
            reason = error_text(error)
        if memory_error is not None:
            raise memory_error
        self.has_failed = True
        log.warning(
            "engine.graphs: a step could not be captured, so steps run eagerly from here on (%s)",
            reason,
        )
        return None


def _find_memory_error(error: BaseException) -> torch.OutOfMemoryError | None:
    """Return the lack of memory that an error came of, or None."""
    # The end of a capture raises a second error over that of the step.
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError):
            return cause
        cause = cause.__context__
    return None


def captured_width(rows: int) -> int:
    """Round rows up to the width of a captured step: 1, 2, 3, 4, 6, 8, 12, 16, ...

    So few are captured.
    """
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if 4 * rows <= 3 * power else power
