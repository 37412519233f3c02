"""Training steps as TorchScript: the same kernels in the same order, without Python between them.

A step that is taken often is recorded once, operation by operation, written down as TorchScript and
compared with itself, to the bit. A script does not hold the interpreter's lock, so that threads
compute side by side.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedpfl.engine.training.turn import Turn
from fedpfl.ground import tree
from fedpfl.ground.records import Record
from fedpfl.ground.tree import Tree

log = logging.getLogger(__name__)

STEPS_BEFORE = 64
"""Steps of a kind and size that Python takes first, as a recording takes as long as some of them."""

STEPS_BEFORE_SIZE = 8
"""The same of a kind that has a script from another size: it is compared, and not recorded."""

MOST_KINDS = 256
"""Kinds and sizes that are looked at: where each client has another, none is worth a script."""

ODD_ROWS = (59, 61, 67)
"""Rows of batches that no network has among its sizes, so that a recording shows where they are."""

VALUE_READERS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
"""By these Python reads values past the dispatcher."""

ODD_RATE = 0.01234567890123
"""A learning rate that no network has among its constants, so that a recording shows where it is."""

Step = Callable[[Sequence[Tensor], Sequence[Tensor], float], Tree]
"""A step changes its tensors in place: `step(tensors, minibatch, learning rate)`.

A minibatch is tensors with a row for each sample, such as their numbers. It returns a record.
"""


class Script(NamedTuple):
    """Take several steps.

    Attributes:
        run: `run(minibatches, learning rate, tensors)` returns the leaves that each step keeps.
        record: A tree of the form of a step's record, without its values.
    """

    run: Callable[[Sequence[Sequence[Tensor]], float, Sequence[Tensor]], list[list[Tensor]]]
    record: Tree

    def take_steps(
        self, minibatches: list[Sequence[Tensor]], rate: float, tensors: Sequence[Tensor]
    ) -> list[Tree]:
        """Take a step on each minibatch; return their records, if any."""
        # TorchScript's optimizer splits a layer's product from its sum, which rounds
        # differently.
        with torch.no_grad(), torch.jit.optimized_execution(False):
            leaves_of_steps = self.run(minibatches, rate, tensors)
        return [tree.rebuild(self.record, leaves) for leaves in leaves_of_steps]


class StepScripts:
    """Take steps, those of a frequent kind by a script.

    Attributes:
        turn: Of the threads that use these scripts.
        steps_at_once: By kind, how many steps go together.
    """

    def __init__(self) -> None:
        self.turn = Turn()
        self.steps_at_once: dict[Hashable, int] = {}
        self._step_counts: dict[Hashable, int] = {}
        self._script_of_kind: dict[Hashable, Script | None] = {}
        self._scripts: dict[Hashable, Script | None] = {}  # by kind and size
        self._keys: dict[Hashable, object] = {}
        self._recording = threading.Lock()

    def find_key(self, kind: Hashable) -> Hashable:
        """Return an object that stands for a kind, which is quicker to look up."""
        return self._keys.setdefault(kind, object())

    def take_steps(
        self,
        kind: Hashable,
        step: Step,
        tensors: list[Tensor],
        minibatches: Sequence[Sequence[Tensor]],
        rate: float,
    ) -> list[Tree]:
        """Take a step on each minibatch; return what each keeps, if anything.

        Args:
            kind: All that a step's operations depend on, beside the values of `tensors` and `rate`
                and the number of rows.
            step: Computes from `tensors` alone, and changes them in place.
            tensors: What steps read and change.
            minibatches: Of each step.
            rate: The learning rate.
        """

        def find_script(minibatch: Sequence[Tensor]) -> Script | None:
            return self._scripts.get((kind, _sizes_of_parts(minibatch)))

        records: list[Tree] = []
        for script, group in itertools.groupby(minibatches, key=find_script):
            parts = list(group)
            if script:
                start_time = time.perf_counter()
                with self.turn.give_away():
                    records += script.take_steps(parts, rate, tensors)
                    self.turn.note_step((time.perf_counter() - start_time) / len(parts))
                continue
            for minibatch in parts:
                record = step(tensors, minibatch, rate)
                if record:
                    records.append(record)
                self._count_step(kind, step, tensors, minibatch)
        return records

    def _count_step(
        self, kind: Hashable, step: Step, tensors: Sequence[Tensor], minibatch: Sequence[Tensor]
    ) -> None:
        """Count a step, and look for a script of one that is taken often."""
        key = kind, _sizes_of_parts(minibatch)
        count = self._step_counts.get(key, 0)
        if count or len(self._step_counts) < MOST_KINDS:
            self._step_counts[key] = count + 1
        steps_before = STEPS_BEFORE_SIZE if self._script_of_kind.get(kind) else STEPS_BEFORE
        is_frequent = self._step_counts.get(key, 0) > steps_before
        if not is_frequent or key in self._scripts or not self._recording.acquire(blocking=False):
            return
        try:  # the other threads go on as before
            if key in self._scripts:
                return
            if kind not in self._script_of_kind:
                self._script_of_kind[kind] = write_script(step, tensors, minibatch)
            script = self._script_of_kind[kind]
            is_same = script is not None and repeats_step(script, step, tensors, minibatch)
            self._scripts[key] = script if is_same else None
        finally:
            self._recording.release()


def write_script(
    step: Step, tensors: Sequence[Tensor], minibatch: Sequence[Tensor]
) -> Script | None:
    """Return a script of a step, None where something in it cannot be written.

    Args:
        step: The step.
        tensors: As the step takes them; they stay as they are.
        minibatch: Of a step; a script takes any number of samples.
    """
    try:
        # A step is recorded on copies: the client goes on from where it was.
        recording = _Recording(_copy_tensors(tensors), _with_odd_sizes(minibatch))
        with recording, _ReadingRefused():
            record = step(recording.tensors, recording.minibatch, ODD_RATE)
        return recording.write_script(record)
    except Exception as error:
        log.debug("engine: a step has no script (%s)", error)
        return None


def repeats_step(
    script: Script, step: Step, tensors: Sequence[Tensor], minibatch: Sequence[Tensor]
) -> bool:
    """Check whether a script repeats a step to the bit.

    Args:
        script: Of `write_script`.
        step: The step.
        tensors: As the step takes them; they stay as they are.
        minibatch: Of a step; with another number of samples kernels may round differently.
    """
    rate = 0.01
    results = _copy_tensors(tensors)
    scripted = _copy_tensors(tensors)
    records: list[Tree] = []
    scripted_records: list[Tree] = []
    try:
        for _ in range(2):  # the second step starts from the result of the first
            record = step(results, minibatch, rate)
            records += [record] if record else []
            scripted_records += script.take_steps([minibatch], rate, scripted)
        return _are_equal([*results, *records], [*scripted, *scripted_records])
    except Exception as error:
        log.debug("engine: a step has no script (%s)", error)
        return False


def _sizes_of_parts(minibatch: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the number of samples of each tensor of a minibatch."""
    return tuple([part.shape[0] for part in minibatch])


def _with_odd_sizes(minibatch: Sequence[Tensor]) -> list[Tensor]:
    """Return a minibatch with samples repeated until their number is odd.

    Parts of one size have one odd size. Raises KeyError for more sizes than there are odd ones.
    """
    odd_sizes = dict(zip(dict.fromkeys(_sizes_of_parts(minibatch)), ODD_ROWS, strict=False))
    return [part[torch.arange(odd_sizes[len(part)]) % len(part)] for part in minibatch]


def _copy_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, of the same layout."""
    return [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in tensors]


def _are_equal(trees: list[Tree], expected: list[Tree]) -> bool:
    """Check whether trees are equal to the bit. Raises ValueError for another number of leaves."""
    leaves = tree.leaves(dict(enumerate(trees)))
    pairs = zip(leaves, tree.leaves(dict(enumerate(expected))), strict=True)
    return all(torch.equal(leaf.nan_to_num(), value.nan_to_num()) for leaf, value in pairs)


class _Unscriptable(Exception):
    """A step does what no script repeats."""


class _ReadingRefused(TorchFunctionMode):
    """Refuse steps in which Python reads values: a script would keep the first ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in VALUE_READERS:
            raise _Unscriptable(f"{func}")
        return func(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):
    """Write down all operations of this thread, in TorchScript.

    Args:
        tensors: Those that operations read and change.
        minibatch: Of the step, with odd numbers of samples.
    """

    def __init__(self, tensors: Sequence[Tensor], minibatch: Sequence[Tensor]):
        super().__init__()
        self.tensors = tensors
        self.minibatch = minibatch
        self._names: dict[int, str] = {}
        for position, leaf in enumerate(tensors):
            self._names[id(leaf)] = f"tensor{position}"
        for position, part in enumerate(minibatch):
            self._names[id(part)] = f"part{position}"
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

    def write_script(self, record: Tree) -> Script:
        """Return the script of the recorded operations, of a step that keeps `record`."""
        # ---- Step 1: the tensors by name, and how many samples there are
        lines = [
            "def steps(minibatches: List[List[Tensor]], rate: float, tensors: List[Tensor])"
            " -> List[List[Tensor]]:",
            "    records: List[List[Tensor]] = []",
        ]
        for position in range(len(self.tensors)):
            lines.append(f"    tensor{position} = tensors[{position}]")
        lines.append("    for minibatch in minibatches:")
        for position, part in enumerate(self.minibatch):
            lines.append(f"        part{position} = minibatch[{position}]")
            lines.append(f"        count{part.shape[0]} = part{position}.size(0)")

        # ---- Step 2: the operations, and the step's record
        results = [self._name_tensor(leaf) for leaf in tree.leaves(record)]
        lines += [f"        {line}" for line in self._lines]
        if results:
            lines.append(f"        records.append([{', '.join(results)}])")
        lines.append("    return records")
        unit = torch.jit.CompilationUnit("\n".join(lines) + "\n")
        return Script(unit.steps, record=tree.map(lambda _: None, record))

    def _write_call(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Write one operation down.

        Raises:
            _Unscriptable: No script repeats it.
        """
        # ---- Step 1: an operation that computes nothing, and those that no script repeats.
        if func is torch.ops.aten.detach.default:
            self._names[id(result)] = self._name_tensor(args[0])
            return
        results = list(result) if isinstance(result, tuple | list) else [result]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        # A number that Python has read from a tensor would be a constant, and so would a size.
        is_read = not all(leaf is None or isinstance(leaf, Tensor) for leaf in results)
        is_sized_by_values = torch.Tag.dynamic_output_shape in func.tags
        if func is torch.ops.aten.index.Tensor:
            is_sized_by_values = any(
                index is not None and index.dtype == torch.bool for index in args[1]
            )
        if func.namespace != "aten" or is_random or is_read or is_sized_by_values:
            raise _Unscriptable(f"{func}")

        # ---- Step 2: the operation, or one for each tensor of a list.
        name = func.overloadpacket.__name__
        if not name.startswith("_foreach_"):
            self._write_line(name, func, (args, kwargs), results)
            return

        # TorchScript takes what changes a list's tensors for dead code: one after another, as
        # PyTorch's kernel for CPUs does it.
        for position in range(len(args[0])):
            parts = [part[position] if isinstance(part, list) else part for part in args]
            leaf = None if result is None else result[position]
            self._write_line(name.removeprefix("_foreach_"), func, (parts, kwargs), [leaf])

    def _write_line(
        self,
        name: str,
        func: Any,
        arguments: tuple[Sequence[Any], Record],
        results: list[Any],
    ) -> None:
        """Write the call of an operation, with arguments by the types that it declares."""
        args, kwargs = arguments
        declared = {argument.name: argument.type for argument in func._schema.arguments}
        texts = []
        for key, value in zip(declared, args, strict=False):
            texts.append(self._write_value(value, declared[key]))
        for key, value in kwargs.items():
            texts.append(f"{key}={self._write_value(value, declared[key])}")
        names = [f"v{len(self._lines)}_{position}" for position in range(len(results))]
        for leaf, new_name in zip(results, names, strict=True):
            # A tensor that was changed in place keeps its name.
            if leaf is not None:
                self._names.setdefault(id(leaf), new_name)
        self._lines.append(f"{', '.join(names)} = torch.ops.aten.{name}({', '.join(texts)})")

    def _write_value(self, value: Any, declared: Any) -> str:
        """Return an argument as TorchScript has it."""
        if isinstance(value, Tensor):
            return self._name_tensor(value)
        if isinstance(value, list | tuple):
            parts = ", ".join([self._write_value(part, declared) for part in value])
            return f"torch.jit.annotate({_list_type(declared)}, [{parts}])"
        if isinstance(value, float):
            if abs(value) == ODD_RATE:
                return "rate" if value > 0 else "-rate"
            return f"float('{value!r}')"
        if isinstance(value, torch.device):
            return f"torch.device('{value}')"
        if type(value) is int and value:
            # A product of their number and a layer's size is a multiple of it.
            for size in _sizes_of_parts(self.minibatch):
                if value % size == 0:
                    return f"{value // size} * count{size}"
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
    """Return the type of a list as TorchScript has it: `List[int]`."""
    found = re.search(r"List\[(\w+|Optional\[\w+\])\]", str(declared))
    assert found
    return found.group()
