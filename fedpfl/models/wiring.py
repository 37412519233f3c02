"""Which hidden neurons an entry of a parameter belongs to: what sub-models of a network are cut
along.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from fedpfl.ground.records import Record, Values
from fedpfl.models.lstm import LSTMLayer

NORMALISATION = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)

POINTWISE = re.compile(
    "(leaky)?relu6?|c?elu|[gs]elu|silu|mish|hard(tanh|swish|sigmoid)|tanh|sigmoid|softplus|identity|"
    "(alpha)?dropout[123]?d?|neg|abs|r?sqrt|square|pow|exp|log|clamp|clip|i?(add|sub|mul|truediv)|div|"
    "eq|ne|gt|ge|lt|le|float|double|half|bfloat16|long|int|bool|to|type|contiguous|clone|detach"
)
OFFSETS = {"add", "iadd", "sub", "isub"}
POOLING = re.compile("(max|avg|lp|adaptivemax|adaptiveavg)pool[123]d")
REDUCING = {"mean", "sum", "amax", "amin"}
SIZES = {"size", "getattr", "dim"}


class Axis(NamedTuple):
    """Neurons of `group` along an axis; `block` consecutive entries belong to one."""

    group: str
    block: int = 1


@dataclass(frozen=True)
class Wiring:
    """How hidden neurons and the entries of parameters and buffers belong together.

    widths: neurons per group, from input to output. A group is named after the first layer that
    makes it; layers that write to one residual stream share it.
    axes: of each parameter and buffer, for each leading axis. None: input channels, tokens,
    classes, always active. Axes beyond these (kernels) have no neurons.
    is_separable: whether a neuron's answer does not depend on its neighbours: no layer takes
    statistics over neurons, and nothing reads how many there are.
    """

    widths: dict[str, int]
    axes: dict[str, tuple[Axis | None, ...]]
    is_separable: bool = True


def trace_wiring(module: nn.Module) -> Wiring:
    """Follow the channels through the network, without an example. Other threads may compute
    meanwhile.

    Convolutions, linear layers, embeddings and LSTM make neurons; what makes the output makes
    classes. Raises ValueError for an operation that is not known to keep neurons apart. Zeroed
    neurons are not always as good as absent ones: GroupNorm and LayerNorm take statistics over
    neurons.
    """
    names = dict(module.named_parameters(remove_duplicate=False))
    if not all(leaf.requires_grad for leaf in names.values()):
        raise ValueError("a network of which parts are frozen has no sub-models; set adapter=none")
    if len(names) != len(dict(module.named_parameters())):
        raise ValueError("parameters that two layers share have no wiring")
    wiring = _trace_mode(module, training=True)
    # Its forward may differ in evaluation.
    try:
        evaluated_wiring = _trace_mode(module, training=False)
    except ValueError:
        return replace(wiring, is_separable=False)
    is_alike = wiring == evaluated_wiring
    return replace(wiring, is_separable=wiring.is_separable and is_alike)


def _trace_mode(module: nn.Module, training: bool) -> Wiring:
    """Return the wiring of a network in training or evaluation. Raises ValueError."""
    was_training = module.training
    module.train(training)
    try:
        with _LOCK:
            graph = _Tracer().trace(module)
    except Exception as error:  # any error of a network's own code on tensors without values
        raise ValueError(f"the network cannot be traced: {error}") from None
    finally:
        module.train(was_training)
    walk = _Walk(module)
    for node in graph.nodes:
        walk.visit(node)
    axes = {
        name: tuple(axis and walk.resolve(axis) for axis in along)
        for name, along in walk.axes.items()
    }
    for name in (*dict(module.named_parameters()), *dict(module.named_buffers())):
        if name not in axes:
            raise ValueError(f"{name} belongs to no layer that is used")
    widths = {g: n for g, n in walk.widths.items() if walk.find(g) == g and g not in walk.classes}
    is_separable = walk.is_separable and not any(map(_has_hooks, module.modules()))
    return Wiring(widths, axes, is_separable)


def _has_hooks(layer: nn.Module) -> bool:
    """Check whether something else is called beside a layer, which no trace shows."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


_LOCK = threading.Lock()


class _Tracer(fx.Tracer):
    """Layers are leaves, this package's too. A trace patches nn.Module for all threads, so that calls
    of other threads pass through. A user's class that computes something else is no leaf.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Check whether it is a layer of torch or this package."""
        is_ours = isinstance(m, (*NORMALISATION, LSTMLayer, nn.Conv2d)) and not has_users_forward(m)
        return is_ours or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Record,
    ) -> Any:
        """Make a node, or for another thread just call."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)


def has_users_forward(layer: nn.Module) -> bool:
    """Check whether a class of a user's says how a layer computes."""
    for kind in type(layer).__mro__:
        if kind.__module__.startswith(("torch.", "fedpfl.")):
            return False
        if {"forward", "_conv_forward"} & vars(kind).keys():
            return True
    return False


@dataclass(frozen=True)
class _Flow:
    """The flow of a value: neurons of `group` along axis `at` (from the end if negative) of
    `rank`, where known.

    group None: no neurons (inputs, sizes). flat: several entries per neuron, one neuron after the
    other.
    """

    group: str | None = None
    at: int = 1
    rank: int | None = None
    flat: bool = False

    def axis(self, index: int) -> int:
        """Return `index` as comparable with `at`."""
        if self.rank is not None:
            return index % self.rank
        if (index < 0) != (self.at < 0):
            raise ValueError(
                "counts axes from the other end than the neurons' and their number is not known"
            )
        return index


class _Walk:
    """The walk over the graph from input to output.

    It joins groups with a union-find, and collects the axes of parameters and buffers.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.flows: dict[fx.Node, _Flow] = {}
        self.widths: dict[str, int] = {}
        self.above: dict[str, str] = {}
        self.axes: dict[str, tuple[Axis | None, ...]] = {}
        self.classes: set[str] = set()
        self.is_separable = True

    def find(self, group: str) -> str:
        """Return the group that `group` has become part of."""
        while group in self.above:
            group = self.above[group]
        return group

    def resolve(self, axis: Axis) -> Axis | None:
        """Return the axis with its final name, None for classes."""
        group = self.find(axis.group)
        return None if group in self.classes else Axis(group, axis.block)

    def visit(self, node: fx.Node) -> None:
        """Find the flow of the node's value."""
        # ---- Step 1: the flows of its inputs, and its name.
        input_flows = [self.flows[inner] for inner in node.all_input_nodes]
        name = getattr(node.target, "__name__", str(node.target))

        # ---- Step 2: by its kind; an error names the layer or the operation.
        try:
            if node.op == "placeholder":
                self.flows[node] = _Flow()
            elif node.op == "output":
                self.finish(node)
            elif node.op == "call_module":
                layer = self.module.get_submodule(name)
                self.flows[node] = self.layer(name, layer, node, input_flows)
            elif node.op in ("call_function", "call_method"):
                self.flows[node] = self.operation(name, node, input_flows)
            else:
                raise ValueError("is a parameter or buffer outside of a layer")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def finish(self, node: fx.Node) -> None:
        """Note that what makes the output makes classes."""
        if not isinstance(node.args[0], fx.Node):
            raise ValueError("must be one tensor")
        if (group := self.flows[node.args[0]].group) is not None:
            self.classes.add(self.find(group))

    def layer(self, name: str, layer: nn.Module, node: fx.Node, input_flows: list[_Flow]) -> _Flow:
        """Compute the flow behind a module that is a leaf."""
        tensors: dict[str, Tensor] = {f"{name}.{key}": p for key, p in layer.named_parameters()}
        tensors |= {f"{name}.{key}": b for key, b in layer.named_buffers()}
        # Entries of a layer that is called twice would belong to two groups.
        if tensors.keys() & self.axes.keys():
            raise ValueError("is used twice")

        # ---- Step 1: layers that keep or make neurons.
        if isinstance(layer, NORMALISATION):
            return self.norm(layer, tensors, input_flows[0])
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            if layer.groups != 1:
                raise ValueError(f"convolutions in {layer.groups} groups have no wiring")
            inputs = self.along(input_flows[0], 1, layer.in_channels)
            rank = 2 + len(layer.kernel_size)
            return self.make(
                name,
                layer.out_channels,
                tensors,
                inputs,
                _Flow(name, 1, rank),
            )
        if isinstance(layer, nn.Linear):
            inputs = self.along(input_flows[0], -1, layer.in_features)
            axes = input_flows[0].rank
            return self.make(
                name, layer.out_features, tensors, inputs, _Flow(name, (axes or 0) - 1, axes)
            )

        # ---- Step 2: layers that read tokens or sequences.
        if isinstance(layer, nn.Embedding | LSTMLayer):
            return self.sequence_layer(name, layer, input_flows[0])

        # ---- Step 3: layers without parameters are operations.
        if tensors:
            raise ValueError(f"{type(layer).__name__} has no known wiring")
        return self.operation(
            type(layer).__name__,
            node,
            input_flows,
            vars(layer),
        )

    def sequence_layer(self, name: str, layer: nn.Embedding | LSTMLayer, flow: _Flow) -> _Flow:
        """Compute the flow behind a layer that reads tokens, or a sequence of vectors."""
        if isinstance(layer, nn.Embedding):
            if flow.group is not None:
                raise ValueError("takes token ids, not neurons")
            self.widths[name] = layer.embedding_dim
            self.axes[f"{name}.weight"] = (None, Axis(name))
            return _Flow(name, -1)
        # A neuron of an LSTM is a block of four rows, one for each gate.
        gates = Axis(name, 4)
        self.widths[name] = layer.width
        self.axes[f"{name}.weight"] = (gates, self.along(flow, -1, layer.inputs))
        self.axes[f"{name}.recurrent"] = (gates, Axis(name))
        self.axes[f"{name}.bias"] = (gates,)
        return _Flow(name, -1)

    def make(
        self, name: str, width: int, tensors: Record, inputs: Axis | None, out: _Flow
    ) -> _Flow:
        """Make new neurons of a layer with weight `[out, in, ...]` and perhaps bias `[out]`."""
        if any(key not in (f"{name}.weight", f"{name}.bias") for key in tensors):
            raise ValueError(f"has more than weight and bias: {', '.join(tensors)}")
        self.widths[name] = width
        for key in tensors:
            self.axes[key] = (Axis(name), inputs) if key.endswith("weight") else (Axis(name),)
        return out

    def along(self, flow: _Flow, index: int, size: int) -> Axis | None:
        """Return axis `index` of a value as an axis of the layer that consumes it."""
        if flow.group is None:
            return None
        if flow.axis(index) != flow.at:
            raise ValueError("works along another axis than the neurons'")
        width = self.widths[flow.group]
        if size % width or (size != width and not flow.flat):
            raise ValueError(f"takes {size} entries of {width} neurons")
        return Axis(flow.group, size // width)

    def norm(self, layer: nn.Module, tensors: dict[str, Tensor], flow: _Flow) -> _Flow:
        """Note vectors along the channels, and counters."""
        # An absent neuron's statistics follow from a count of calls, which instance norms leave out.
        if isinstance(layer, nn.LayerNorm | nn.GroupNorm | nn.modules.instancenorm._InstanceNorm):
            self.is_separable = False
        if isinstance(layer, nn.LayerNorm):
            if len(layer.normalized_shape) != 1:
                raise ValueError("normalises over more than one axis")
            index = -1
            size = int(layer.normalized_shape[0])
        else:
            assert isinstance(layer, nn.GroupNorm | nn.modules.batchnorm._NormBase)
            index = 1
            size = layer.num_channels if isinstance(layer, nn.GroupNorm) else layer.num_features
            if flow.rank is None and flow.at == -1:  # BatchNorm1d after a linear layer
                flow = replace(flow, at=1, rank=2)
        axis = self.along(flow, index, size)
        for key, value in tensors.items():
            self.axes[key] = (axis,) if value.dim() else ()
        return flow

    def operation(
        self,
        name: str,
        node: fx.Node,
        input_flows: list[_Flow],
        settings: Values | None = None,
    ) -> _Flow:
        """Compute the flow behind a function, a method or a layer without parameters."""
        # ---- Step 1: the operation's name and options, and the value that it works on.
        kind = name.replace("_", "").lower()
        arguments = node.args[1:]
        options = {**node.kwargs, **(settings or {})}

        def option(at: int, key: str, default: Any) -> Any:
            return arguments[at] if len(arguments) > at else options.get(key, default)

        flow = next(
            (f for f in input_flows if f.group is not None),
            input_flows[0] if input_flows else _Flow(),
        )

        # ---- Step 2: what works entry by entry, or leaves no neurons.
        if POINTWISE.fullmatch(kind):
            return self.combine(kind, input_flows, flow)
        if kind in SIZES or (kind in ("getitem", "unsqueeze") and flow.group is None):
            if flow.group is not None and not _reads_batch_size(kind, node):
                self.is_separable = False
            return _Flow()

        # ---- Step 3: what changes axes.
        if POOLING.fullmatch(kind):
            if flow.group is not None and flow.axis(1) != flow.at:
                raise ValueError("pools over neurons")
            return flow
        if kind in REDUCING:
            return self.reduce(flow, option(0, "dim", None), option(1, "keepdim", False))
        if kind == "select":
            return self.reduce(flow, arguments[0], False)
        if kind == "flatten":
            start = option(0, "start_dim", 1 if settings else 0)
            return self.flatten(flow, start, option(1, "end_dim", -1))
        if kind in ("view", "reshape"):
            return self.flatten_by_shape(flow, arguments)
        raise ValueError("is not known to keep neurons apart")

    def flatten_by_shape(self, flow: _Flow, arguments: tuple[Any, ...]) -> _Flow:
        """Return the flow after a view, which may keep the first axis alone."""
        shape: Any = arguments
        if len(arguments) == 1 and isinstance(arguments[0], tuple | list):
            shape = arguments[0]
        if len(shape) != 2 or (-1 not in shape and not isinstance(shape[0], fx.Node)):
            raise ValueError("only (batch, -1) keeps track of neurons")
        # A width that is written down does not follow the neurons.
        if shape[1] != -1:
            self.is_separable = False
        return self.flatten(flow, 1, -1)

    def combine(self, kind: str, input_flows: list[_Flow], flow: _Flow) -> _Flow:
        """Join the neurons of values that meet entry by entry."""
        if flow.group is None:
            return flow
        for operand in input_flows:
            if operand.group is None:
                if kind in OFFSETS:
                    # An absent neuron would still have the input's value.
                    raise ValueError("adds neurons and the network's input")
                # The input may have an entry for each neuron.
                self.is_separable = False
                continue
            a = self.find(flow.group)
            b = self.find(operand.group)
            if a == b:
                continue
            if (
                replace(flow, group=b) != replace(operand, group=b)
                or self.widths[a] != self.widths[b]
            ):
                raise ValueError(f"neurons of {a} and {b} do not match")
            # The group that was made first gives its name, as the neurons are in its order.
            first, second = sorted((a, b), key=list(self.widths).index)
            self.above[second] = first
        return flow

    def reduce(self, flow: _Flow, dim: Any, keepdim: bool) -> _Flow:
        """Return the value without the axes `dim`."""
        if flow.group is None:
            return flow
        if dim is None:
            raise ValueError("takes all neurons together")
        reduced_axes = {flow.axis(index) for index in ((dim,) if isinstance(dim, int) else dim)}
        if flow.at in reduced_axes:
            raise ValueError("takes neurons together")
        if keepdim:
            return flow
        # Axes are counted from their own end, so that only those on that side move the neurons'.
        before = (
            sum(index < flow.at for index in reduced_axes)
            if flow.at >= 0
            else -sum(index > flow.at for index in reduced_axes)
        )
        rank = None if flow.rank is None else flow.rank - len(reduced_axes)
        return replace(flow, at=flow.at - before, rank=rank)

    def flatten(self, flow: _Flow, start_dim: int, end_dim: int) -> _Flow:
        """Return the flow after the axes from `start_dim` to `end_dim` become one."""
        if flow.group is None:
            return _Flow(rank=2) if (start_dim, end_dim) == (1, -1) else _Flow()
        if flow.rank is None:
            raise ValueError("needs a known number of axes")
        first_axis = start_dim % flow.rank
        last_axis = end_dim % flow.rank
        if first_axis < flow.at <= last_axis:
            raise ValueError("mixes neurons with the axes before theirs")
        merged = last_axis - first_axis
        flat = flow.flat or (first_axis == flow.at and merged > 0)
        return _Flow(
            flow.group,
            flow.at - merged * (flow.at > last_axis),
            flow.rank - merged,
            flat,
        )


def _reads_batch_size(kind: str, node: fx.Node) -> bool:
    """Check whether a node reads of a shape the number of samples alone."""
    if kind == "dim":
        return True
    if kind == "size":
        return node.args[1:] == (0,)
    is_shape = node.args[1:] == ("shape",)
    return is_shape and all(user.args[1:] == (0,) for user in node.users)
