"""A network as a pure function of its parameters and buffers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.utils._python_dispatch import TorchDispatchMode

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record
from fedpfl.ground.tree import Tree
from fedpfl.models.norm import PaddedNorm
from fedpfl.models.shapes import answer_axes
from fedpfl.models.split import Parts, find_parts
from fedpfl.models.traits import Traits, differs

Slot = tuple[Record, str, str]
"""Where a module keeps a parameter that trains, or a buffer: a dict, its key there, its full name.
"""


class Net:
    """A module as a function of its parameters and buffers: `net.bind(buffers)(params, x)`.

    One Net serves one thread, because a functional call borrows the module for its duration;
    `copy()` makes more.

    Attributes:
        params: Parameters that train. What several layers share (tied weights) is one entry, under
            its first name.
        frozen: Parameters that ask for no gradient. They stay in the module, one for all clients
            and threads, and are in no tree that a method, a store or a checkpoint sees. Those that
            calls change by hand (`traits.moving`) are buffers.
        constants: Buffers that no call writes to (`traits.constant`), kept like frozen parameters.
        name: Of the model, for messages.
        traits: Side effects of its calls.
        common: A small network beside it that all clients have alike, None without any.
        facts: About parts, which a module does not tell.
        parts: Roles of the parameters.
    """

    kinds: Sequence[int] = ()
    _kind_nets: tuple[Net, ...] = ()

    def __init__(
        self,
        module: nn.Module,
        traits: Traits | None = None,
        name: str = "",
        common: Net | None = None,
        **facts: Any,
    ):
        # ---- Step 1: trained values, frozen ones, and buffers; parameters that calls move count as
        # buffers.
        self.module = module
        self.traits = traits or Traits()
        self.name = name
        self.common = common
        self.facts = facts
        self.params: Tree = {}
        self.frozen: Tree = {}
        self.constants: Tree = {}
        moving: Tree = {}
        for key, leaf in module.named_parameters():
            if leaf.requires_grad:
                self.params[key] = leaf.detach().clone()
            elif key in self.traits.moving:
                moving[key] = leaf.detach().clone()
            else:
                self.frozen[key] = leaf.detach()
        self.buffers: Tree = dict(sorted(moving.items()))
        for key, buffer in module.named_buffers():
            is_constant = key in self.traits.constant
            (self.constants if is_constant else self.buffers)[key] = buffer.detach().clone()

        # ---- Step 2: names and roles.
        self.aliases = find_aliases(module)
        """Further names of parameters and buffers that layers share, with the name of their entry.
        """
        self.parts: Parts = find_parts(
            module,
            statistics=self.buffers,
            aliases=self.aliases,
            common=common.params if common else {},
            common_head=common.parts.head_entries if common else (),
            **facts,
        )

        # ---- Step 3: where calls put values, and a module that none has touched.
        self.norms = [m for m in module.modules() if isinstance(m, PaddedNorm)]
        self.slots = self._find_slots(module)
        self._buffer_slots = [slot for slot in self.slots if slot[2] in self.buffers]
        self._uncalled = module if self.traits.trusted else _copy_sharing(module)
        """The module as it was made: calls may leave tensors of a graph in attributes, which have
        no copies.
        """
        self.generator: torch.Generator | None = None
        """The generator of the network's draws; None: the process's."""

    @property
    def head(self) -> nn.Module:
        """Return the layer that answers the classes. Raises FedpflError where it is not clear which
        one that is.
        """
        name = self.parts.head_layer
        try:
            return self.module.get_submodule(name)
        except AttributeError:
            raise FedpflError(
                f"model={self.name}: this method works on what the head reads, and "
                f"model.head={name} is a parameter; "
                "put it into a layer"
            ) from None

    @property
    def nets(self) -> tuple[Net, ...]:
        """Return the network of each kind; one where clients have networks of one form."""
        return self._kind_nets or (self,)

    @property
    def fixed(self) -> Tree:
        """Return frozen parameters and constant buffers, which all clients share."""
        return {**self.frozen, **self.constants}

    def require_constants(self) -> None:
        """Raise FedpflError where a call has written to a constant buffer after all."""
        live = dict(self.module.named_buffers()) if self.constants else {}
        for name, value in self.constants.items():
            if differs(value, live.get(name)):
                raise FedpflError(
                    f"model={self.name}: forward changes the buffer {name}, but not from its first"
                    " call on; write to it in every call in training mode, if only its own values"
                )

    def with_facts(self, **facts: Any) -> Net:
        """Return the same Net with further facts of Parts, such as the number of rounds."""
        return self._rebuild(self.module, **{**self.facts, **facts})

    def copy(self) -> Net:
        """Return an independent Net for another thread."""
        # Fixed values may be large: copies share them, as no call writes to them.
        fixed = self._find_fixed(self.module)
        return self._rebuild(copy.deepcopy(self._uncalled, fixed), **self.facts)

    def copy_module(self) -> nn.Module:
        """Return a copy of the module and its values, as it was made."""
        return copy.deepcopy(self._uncalled)

    def with_module(self, module: nn.Module) -> Net:
        """Return a Net of another module of the same form."""
        return self._rebuild(module, **self.facts)

    def to(self, device: torch.device) -> Net:
        """Move fixed values to a device, and return the Net."""
        for leaf in self._find_fixed(self.module).values():
            leaf.data = leaf.data.to(device)
        return self._rebuild(self.module, **self.facts)

    def with_fixed(self, values: Tree) -> Net:
        """Let given fixed values replace the Net's equal ones, which take no memory then."""
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for name, value in values.items():
            named[name].data = value
        return self._rebuild(self.module, **self.facts)

    def _find_fixed(self, module: nn.Module) -> dict[int, Tensor]:
        """Return frozen parameters and constant buffers of a module of this form, by identity."""
        fixed: list[Tensor] = [leaf for leaf in module.parameters() if not leaf.requires_grad]
        fixed += tree.select(dict(module.named_buffers()), self.constants).values()
        return {id(leaf): leaf for leaf in fixed}

    def _rebuild(self, module: nn.Module, **facts: Any) -> Net:
        common = self.common and self.common.copy()
        return Net(module, self.traits, self.name, common, **facts)

    def bind(
        self, buffers: dict[str, Tree], training: bool = False, weight: Tensor | None = None
    ) -> Bound:
        """Attach buffers (one tree per role) and, for padded batches, the samples' weights
        `[batch]`.
        """
        return Bound(self, buffers, training, weight)

    def differentiate_loss(self, loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        """Return the gradient of a loss of this network at some leaves."""
        if not self.traits.recomputes:
            return list(torch.autograd.grad(loss, leaves, materialize_grads=True))
        # Reentrant checkpointing adds up its gradients in the leaves, and gives `autograd.grad`
        # none.
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    def state_dict(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return values of this network as torch's own `state_dict` has them.

        What layers share stands under all its names, and buffers that are not persistent are left
        out.
        """
        shared = {alias: values[name] for alias, name in self.aliases.items() if name in values}
        stored = self.module.state_dict().keys()
        return {name: value for name, value in {**values, **shared}.items() if name in stored}

    def _find_slots(self, module: nn.Module) -> list[Slot]:
        """Return where a module of this form keeps each parameter that trains, and each buffer."""
        slots: list[Slot] = []
        for prefix, layer in module.named_modules():
            for tensors in (layer._parameters, layer._buffers):
                for key, value in tensors.items():
                    full_name = f"{prefix}.{key}" if prefix else key
                    full_name = self.aliases.get(full_name, full_name)
                    # Frozen parameters stay in the module: no call puts values there.
                    if value is not None and (
                        full_name in self.params or full_name in self.buffers
                    ):
                        slots.append((tensors, key, full_name))
        return slots

    def _call(self, values: Tree, x: Tensor) -> tuple[Tensor, Tree]:
        """Return the logits of the network with these values, and its buffers after the call.

        What torch.func.functional_call does, without its checks, which cost a few per cent of a
        step.
        """
        before = [tensors[key] for tensors, key, _ in self.slots]
        try:
            for tensors, key, name in self.slots:
                tensors[key] = values[name]
            logits = self.module(x)
            return logits, _read_buffers(self._buffer_slots, values)
        finally:
            for (tensors, key, _), value in zip(self.slots, before, strict=True):
                tensors[key] = value

    def _call_copy(self, values: Tree, x: Tensor) -> tuple[Tensor, Tree]:
        """Do what `_call` does on a copy of the module that keeps the values: the backward pass
        reads them again.
        """
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, values.values())):
            raise FedpflError(
                f"model={self.name}: the method differentiates by torch.func here, which cannot "
                "differentiate "
                "activation checkpointing; turn checkpointing off in the network"
            )
        new_values = {id(tensors[key]): values[name] for tensors, key, name in self.slots}
        module = copy.deepcopy(self.module, {**self._find_fixed(self.module), **new_values})
        logits = module(x)
        buffer_slots = [slot for slot in self._find_slots(module) if slot[2] in self.buffers]
        return logits, _read_buffers(buffer_slots, values)

    def _draw_from_generator(self) -> AbstractContextManager[Any]:
        """Return a context in which the network draws from `generator`, if it has one."""
        if self.generator is None or not self.traits.draws:
            return nullcontext()
        return _DrawFrom(self.generator)


def _copy_sharing(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares its parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(leaf): leaf for leaf in tensors})


def _read_buffers(buffer_slots: list[Slot], values: Tree) -> Tree:
    """Return the buffers as a call left them, changed in place or assigned."""
    buffers: Tree = {}
    for tensors, key, name in buffer_slots:
        value = tensors[key]
        if value is not values[name]:  # assigned, perhaps with its graph, or in autocast's dtype
            value = value.detach().to(values[name].dtype)
        buffers[name] = value
    return buffers


def find_aliases(module: nn.Module) -> dict[str, str]:
    """Return further names of tensors that several layers hold, and the first name of each."""
    first_names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    named_tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, leaf in named_tensors:
        if first_names.setdefault(id(leaf), name) != name:
            aliases[name] = first_names[id(leaf)]
    return aliases


_DEFAULT_GENERATOR = threading.Lock()


class _DrawFrom(TorchDispatchMode):
    """Have torch's random operations of this thread draw from a generator of the thread's own.

    Operations take the process's generator, which threads share, so it is lent the state of the
    thread's one.
    """

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        process = torch.default_generator
        with _DEFAULT_GENERATOR:
            before = process.get_state()
            process.set_state(self._generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self._generator.set_state(process.get_state())
                process.set_state(before)


class Bound:
    """A Net with its buffers attached.

    After calls in training mode `buffers` holds their latest values.
    """

    def __init__(self, net: Net, buffers: dict[str, Tree], training: bool, weight: Tensor | None):
        self.net, self.buffers, self.training, self.weight = net, buffers, training, weight

    @property
    def common(self) -> Bound:
        """Return the network that all clients have alike, which keeps no statistics."""
        assert self.net.common, "Parts.common tells a method whether there is one"
        return Bound(self.net.common, {}, self.training, self.weight)

    def still(self, buffers: dict[str, Tree] | None = None) -> Bound:
        """Return the same in evaluation mode, with other `buffers` if given: statistics are used
        and do not move.
        """
        return Bound(
            self.net,
            self.buffers if buffers is None else buffers,
            False,
            self.weight,
        )

    def aside(self, params: Tree, x: Tensor, role: str = "main") -> Tensor:
        """Return logits as a call does, but leave the statistics as they are."""
        buffers_before = self.buffers
        logits = self(params, x, role)
        self.buffers = buffers_before
        return logits

    def gradient(
        self, objective: Callable[[Bound, Tree, Any], Tensor], params: Tree, batch: Any
    ) -> tuple[Tree, Tensor]:
        """Return the gradient of `objective(net, params, batch)` and its value; statistics move as
        in training.
        """

        def inner(params: Tree) -> tuple[Tensor, dict[str, Tree]]:
            bound = Bound(
                self.net,
                self.buffers,
                self.training,
                batch.weight,
            )
            return objective(bound, params, batch), bound.buffers

        if self.net.traits.recomputes:
            copies = tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), params)
            with torch.enable_grad():
                value, self.buffers = inner(copies)
            grads = self.net.differentiate_loss(value, tree.leaves(copies))
            return tree.rebuild(copies, grads), value.detach()
        grads, (value, self.buffers) = grad_and_value(inner, has_aux=True)(params)
        return grads, value

    def features(self, params: Tree, x: Tensor, role: str = "main") -> tuple[Tensor, Tensor]:
        """Return logits as by a call, and the head's input `[batch, features]`.

        That is of the head's own precision under any autocast.

        Raises FedpflError for a head that takes something else, such as a convolution.
        """
        if x.shape[0] == 0:  # as in `__call__`, but for the number of features
            stand_in = x.new_zeros(1, *x.shape[1:])
            logits, inputs = self.still().features(params, stand_in, role)
            return logits[:0], inputs[:0]
        head_inputs: list[Tensor] = []
        # A hook reads the head's input, after all that forward does before it.
        hook = self.net.head.register_forward_pre_hook(
            lambda _, inputs: head_inputs.append(inputs[0])
        )
        try:
            logits = self(params, x, role)
        finally:
            hook.remove()
        if not head_inputs or head_inputs[0].dim() != 2:
            raise FedpflError(
                f"model={self.net.name}: this method works on what the head reads, and forward does"
                f" not call {self.net.parts.head_layer}(x) on x [batch, features]"
            )
        # Autocast has them in less than the head's own precision.
        head_dtype = next(self.net.head.parameters()).dtype
        return logits, head_inputs[0].to(head_dtype)

    def __call__(self, params: Tree, x: Tensor, role: str = "main") -> Tensor:
        """Return float32 logits `[batch, classes]` of the network with `params`; `role` picks a
        model's buffers.
        """
        # Many networks cannot be called on no samples, or would move statistics to nan.
        # Not `len`, which an exporter takes for a constant.
        net = self.net
        if x.shape[0] == 0:
            sizes = (0, *answer_axes(net.parts.sample), net.parts.classes)
            return torch.zeros(sizes, device=x.device)

        # ---- Step 1: the module, its buffers and samples as this call wants them.
        traits = net.traits
        # Setting the mode walks over all layers, so only where it changes.
        if net.module.training != self.training:
            net.module.train(self.training)
        _weigh_samples(net.norms, self.weight)
        buffers = self.buffers.get(role, {})
        if buffers and (self.training or not traits.trusted):
            # The module changes them in place, which must never be the caller's.
            buffers = tree.map(lambda leaf: leaf.clone(), buffers)
        if not traits.trusted:
            x = x.clone()

        # ---- Step 2: the call
        call = net._call_copy if traits.recomputes else net._call
        try:
            with net._draw_from_generator():
                logits, after = call({**params, **buffers}, x)
        finally:
            # Also where the network raises: the next call may have no padding.
            _weigh_samples(net.norms, None)
        if buffers and self.training:
            self.buffers = {**self.buffers, role: after}
        return logits.float()


def _weigh_samples(norms: list[PaddedNorm], weight: Tensor | None) -> None:
    """Tell normalisations the weights of the samples that come next."""
    for norm in norms:
        norm.sample_weight = weight
