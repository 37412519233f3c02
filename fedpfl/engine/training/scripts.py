"""Training steps as TorchScript: the same kernels in the same order, without Python between them.

A step that is taken often is recorded once, operation by operation, written down as TorchScript and
compared with itself, to the bit. A script does not hold the interpreter's lock, so that threads
compute side by side.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)

STEPS_BEFORE = 64
"""Steps of a kind and size that Python takes first, as a recording takes as long as some of them."""

MOST_KINDS = 256
"""Kinds and sizes that are looked at: where each client has another, none is worth a script."""

ODD_ROWS = 59
"""Rows of a minibatch that no network has among its sizes, so that a recording shows where it is."""

ODD_RATE = 0.01234567890123
"""A learning rate that no network has among its constants, so that a recording shows where it is."""

Step = Callable[[Sequence[Tensor], Tensor, float], None]
"""A step changes its tensors in place: `step(tensors, rows of the minibatch, learning rate)`."""

Script = Callable[[Sequence[Tensor], float, Sequence[Tensor]], None]
"""Several steps: `script(rows of each minibatch, learning rate, tensors)`."""


class StepScripts:
    """Take steps, those of a frequent kind by a script.

    Args:
        steps_before: Steps of a kind before it is recorded; None: STEPS_BEFORE.
    """

    def __init__(self, steps_before: int | None = None):
        self._steps_before = STEPS_BEFORE if steps_before is None else steps_before
        self._step_counts: dict[Hashable, int] = {}
        self._script_of_kind: dict[Hashable, Script | None] = {}
        self._scripts: dict[Hashable, Script | None] = {}  # by kind and size
        self._numbers: dict[Hashable, int] = {}
        self._next_number = itertools.count()
        self._recording = threading.Lock()

    def number_kind(self, kind: Hashable) -> int:
        """Return a number for a kind, which is quicker to look up."""
        # Threads ask at the same time: a number that was drawn is nobody else's.
        return self._numbers.setdefault(kind, next(self._next_number))

    def take_steps(
        self,
        kind: Hashable,
        step: Step,
        tensors: list[Tensor],
        minibatches: list[Tensor],
        rate: float,
    ) -> None:
        """Take a step on each minibatch.

        Args:
            kind: All that a step's operations depend on, beside the values of `tensors` and `rate`
                and the number of rows.
            step: Computes from `tensors` alone, and changes them in place.
            tensors: What steps read and change.
            minibatches: Rows of each.
            rate: The learning rate.
        """

        def find_script(rows: Tensor) -> Script | None:
            return self._scripts.get((kind, rows.shape[0]))

        for script, group in itertools.groupby(minibatches, key=find_script):
            if script is None:
                for rows in group:
                    step(tensors, rows, rate)
                    self._count_step(kind, step, tensors, rows)
                continue
            # TorchScript's optimizer takes a layer's product apart from its sum, which rounds
            # otherwise.
            with torch.no_grad(), torch.jit.optimized_execution(False):
                script(list(group), rate, tensors)

    def _count_step(
        self, kind: Hashable, step: Step, tensors: Sequence[Tensor], rows: Tensor
    ) -> None:
        """Count a step, and look for a script of one that is taken often."""
        key = kind, rows.shape[0]
        count = self._step_counts.get(key, 0)
        if count or len(self._step_counts) < MOST_KINDS:
            self._step_counts[key] = count + 1
        is_frequent = self._step_counts.get(key, 0) > self._steps_before
        if not is_frequent or key in self._scripts or not self._recording.acquire(blocking=False):
            return
        try:  # the other threads go on as before
            if key in self._scripts:
                return
            if kind not in self._script_of_kind:
                self._script_of_kind[kind] = write_script(step, tensors, rows)
            script = self._script_of_kind[kind]
            is_same = script is not None and repeats_step(script, step, tensors, rows)
            self._scripts[key] = script if is_same else None
        finally:
            self._recording.release()


def write_script(step: Step, tensors: Sequence[Tensor], rows: Tensor) -> Script | None:
    """Return a script of a step, None where something in it cannot be written.

    Args:
        step: The step.
        tensors: As the step takes them; they stay as they are.
        rows: Of a minibatch; a script takes any number of them.
    """
    odd_rows = rows[torch.arange(ODD_ROWS) % len(rows)]
    try:
        # A step is recorded on copies: the client goes on from where it was.
        recording = _Recording(_copy_tensors(tensors), odd_rows)
        with recording:
            step(recording.tensors, odd_rows, ODD_RATE)
        return recording.write_script()
    except Exception as error:
        log.debug("engine: a step has no script (%s)", error)
        return None


def repeats_step(script: Script, step: Step, tensors: Sequence[Tensor], rows: Tensor) -> bool:
    """Return whether a script changes tensors as a step does, to the bit.

    Args:
        script: Of `write_script`.
        step: The step.
        tensors: As the step takes them; they stay as they are.
        rows: Of a minibatch; with another number of rows kernels may round differently.
    """
    rate = 0.01
    results = _copy_tensors(tensors)
    scripted = _copy_tensors(tensors)
    try:
        for _ in range(2):  # the second one starts from what the first one has changed
            step(results, rows, rate)
            with torch.no_grad(), torch.jit.optimized_execution(False):
                script([rows], rate, scripted)
    except Exception as error:
        log.debug("engine: a step of %s rows has no script (%s)", len(rows), error)
        return False
    if not all(map(_are_equal, results, scripted)):
        log.debug("engine: a step of %s rows has no script (it rounds in another way)", len(rows))
        return False
    return True


def _copy_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, of the same layout."""
    return [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in tensors]


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal to the bit."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


class _Unscriptable(Exception):
    """A step does what no script repeats."""


class _Recording(TorchDispatchMode):
    """Write down all operations of this thread, in TorchScript.

    Args:
        tensors: What they read and change.
        rows: Of the minibatch.
    """

    def __init__(self, tensors: Sequence[Tensor], rows: Tensor):
        super().__init__()
        self.tensors = tensors
        self._names = {id(leaf): f"tensor{position}" for position, leaf in enumerate(tensors)}
        self._names[id(rows)] = "rows"
        self._lines: list[str] = []
        self._alive: list[Any] = []  # while they live, no other tensor has their identity

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or the first operation imports the compiler, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*(args or ()), **kwargs)
        self._alive.append((args, kwargs, result))
        self._write_call(func, args, kwargs, result)
        return result

    def write_script(self) -> Script:
        """Return the script of what was recorded."""
        lines = [
            "def steps(minibatches: List[Tensor], rate: float, tensors: List[Tensor]) -> None:"
        ]
        for position in range(len(self.tensors)):
            lines.append(f"    tensor{position} = tensors[{position}]")
        lines.append("    for rows in minibatches:")
        lines.append("        count = rows.size(0)")
        lines += [f"        {line}" for line in self._lines]
        return torch.jit.CompilationUnit("\n".join(lines) + "\n").steps

    def _write_call(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Write one operation down.

        Raises:
            _Unscriptable: No script repeats it.
        """
        # ---- Step 1: what computes nothing, and what no script repeats.
        if func is torch.ops.aten.detach.default:
            self._names[id(result)] = self._name_tensor(args[0])
            return
        results = list(result) if isinstance(result, tuple | list) else [result]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        # A number that Python has read from a tensor would be a constant.
        is_read = not all(leaf is None or isinstance(leaf, Tensor) for leaf in results)
        if func.namespace != "aten" or is_random or is_read:
            raise _Unscriptable(f"{func}")

        # ---- Step 2: the operation, or one for each tensor of a list.
        name = func.overloadpacket.__name__
        declared = {argument.name: argument.type for argument in func._schema.arguments}
        if not name.startswith("_foreach_"):
            self._write_line(name, declared, (args, kwargs), results)
            return

        # TorchScript takes what changes a list's tensors for dead code: one after another, as
        # PyTorch's kernel for CPUs does it.
        for position in range(len(args[0])):
            parts = [part[position] if isinstance(part, list) else part for part in args]
            leaf = None if result is None else result[position]
            self._write_line(name.removeprefix("_foreach_"), declared, (parts, kwargs), [leaf])

    def _write_line(
        self,
        name: str,
        declared: dict[str, Any],
        arguments: tuple[Sequence[Any], dict[str, Any]],
        results: list[Any],
    ) -> None:
        """Write the call of an operation, with arguments by the types that it declares."""
        args, kwargs = arguments
        texts = []
        for key, value in zip(declared, args, strict=False):
            texts.append(self._write_value(value, declared[key]))
        for key, value in kwargs.items():
            texts.append(f"{key}={self._write_value(value, declared[key])}")
        names = [f"v{len(self._lines)}_{position}" for position in range(len(results))]
        for leaf, new_name in zip(results, names, strict=True):
            # What was changed in place keeps its name.
            if leaf is not None:
                self._names.setdefault(id(leaf), new_name)
        self._lines.append(f"{', '.join(names)} = torch.ops.aten.{name}({', '.join(texts)})")

    def _write_value(self, value: Any, declared: Any) -> str:
        """Return an argument as TorchScript has it."""
        if isinstance(value, Tensor):
            return self._name_tensor(value)
        if isinstance(value, list | tuple):
            parts = ", ".join([self._write_value(part, declared) for part in value])
            if value and "Optional[Tensor]" not in str(declared):
                return f"[{parts}]"
            return f"torch.jit.annotate({_list_type(declared)}, [{parts}])"
        if isinstance(value, float):
            if abs(value) == ODD_RATE:
                return "rate" if value > 0 else "-rate"
            return f"float('{value!r}')"
        if isinstance(value, torch.device):
            return f"torch.device('{value}')"
        if type(value) is int and value == ODD_ROWS:
            return "count"
        return repr(value)

    def _name_tensor(self, leaf: Tensor) -> str:
        """Return the name of a tensor.

        Raises:
            _Unscriptable: It is neither the step's nor computed, but a constant of this one step.
        """
        if id(leaf) not in self._names:
            raise _Unscriptable("a constant")
        return self._names[id(leaf)]


def _list_type(declared: Any) -> str:
    """Return the type of an empty list as TorchScript has it: `List[int]`."""
    text = str(declared)
    start = text.index("List[")
    end = text.index("]", start)
    element = text[start + len("List[") : end]
    return f"List[{element}]]" if "[" in element else f"List[{element}]"
