"""Whether a network can be vectorised over clients, tried on two made-up clients.

It is tried with what engine=batched does to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.seeding import seeded_process
from fedpfl.ground.tree import Tree
from fedpfl.models.net import Net
from fedpfl.models.traits import SEED, made_up_samples

DOUBLE_UP_TO = 2_000_000  # parameters of a network that is tried in float64
ROWS = 4  # of a minibatch, of which the second client has one less
ACROSS_TRAINING = "it looks at other samples of a minibatch, and short minibatches are padded there"
ACROSS_EVALUATION = "it looks at other samples of a batch in evaluation, and those are others there"


def find_obstacle(net: Net) -> str:
    """Return why the batched backend cannot take a network, in words; "" where it can.

    A step and an evaluation of two clients, one with a padded minibatch, must equal each client's
    alone. Networks of this package are known to.
    """
    if net.traits.trusted or not net.parts.sample:
        return ""
    if net.traits.recomputes:
        return "it recomputes activations in the backward pass (checkpointing)"

    # ---- Both clients together, against each alone.
    for training in (True, False):
        try:
            alone = [_step(net, client, ROWS - client, training) for client in (0, 1)]
            together = _steps_together(net, training)
        except FedpflError:
            raise
        except Exception as error:
            return error_text(error, with_class=True)[:160]
        if not all(_agree(one, tree.take(together, client)) for client, one in enumerate(alone)):
            return ACROSS_TRAINING if training else ACROSS_EVALUATION

    # ---- In evaluation, a batch against a part of it.
    full_batch = _step(net, 0, ROWS, training=False)["logits"][:2]
    half_batch = _step(net, 0, 2, training=False)["logits"][:2]
    if not _agree({"logits": full_batch}, {"logits": half_batch}):
        return ACROSS_EVALUATION
    return ""


def mixes_samples(net: Net) -> bool:
    """Return whether logits of samples depend on which others are trained on beside them."""
    if net.traits.trusted or not net.parts.sample:
        return bool(net.norms)
    full_batch = _step(net, 0, ROWS, training=True)["logits"][:2]
    half_batch = _step(net, 0, 2, training=True)["logits"][:2]
    return not _agree({"logits": full_batch}, {"logits": half_batch})


def require_vectorized(net: Net) -> None:
    """Raise FedpflError for a network that the batched backend cannot take."""
    if obstacle := find_obstacle(net):
        raise FedpflError(
            f"model={net.name}: engine=batched cannot vectorise this network over clients "
            f"({obstacle}); use engine=loop"
        )


def _step(net: Net, client: int, rows: int, training: bool) -> Tree:
    """Return a client's gradient, logits and buffers after a minibatch of `rows` samples."""
    params, buffers, x = _inputs(net, client)
    with ConstantDraws(), seeded_process(SEED):
        return _differentiate(
            net,
            params,
            buffers,
            x[:rows],
            None,
            rows,
            training,
        )


def _steps_together(net: Net, training: bool) -> Tree:
    """Return gradients, logits and buffers of both clients, vectorised.

    The second client's minibatch is padded with a sample of weight 0.
    """
    inputs = [_inputs(net, client) for client in (0, 1)]
    params = tree.stack([client_params for client_params, _, _ in inputs])
    buffers = tree.stack([client_buffers for _, client_buffers, _ in inputs])
    x = torch.stack([values[2] for values in inputs])
    x[1, -1] = x[0, 0]  # padding is some sample
    weight = torch.ones(2, ROWS, dtype=torch.float64)
    weight[1, -1] = 0

    def one(_: Tensor, params: Tree, buffers: Tree, x: Tensor, weight: Tensor) -> Tree:
        return _differentiate(
            net, params, buffers, x, weight.to(_float_type(params)), ROWS, training
        )

    with ConstantDraws(), seeded_process(SEED):
        return vmap(one, randomness="different")(
            torch.arange(2),
            params,
            buffers,
            x,
            weight,
        )


def _differentiate(
    net: Net,
    params: Tree,
    buffers: Tree,
    x: Tensor,
    weight: Tensor | None,
    rows: int,
    training: bool,
) -> Tree:
    """Return gradient, logits of the real rows and changes of buffers of one client."""

    def objective(params: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
        bound = net.bind({"main": buffers} if buffers else {}, training, weight)
        logits = bound(params, x)
        shares = torch.ones(rows) if weight is None else weight
        # The cross-entropy of class 0, which every network has.
        losses = logits.logsumexp(1) - logits[:, 0]
        return (losses * shares).sum() / shares.sum(), (logits, bound.buffers.get("main", {}))

    gradient, (_, (logits, after)) = grad_and_value(objective, has_aux=True)(params)
    # By their changes: a slow average hardly moves, whatever it is of.
    changes = {}
    for name, leaf in after.items():
        changes[name] = leaf - buffers[name] if leaf.is_floating_point() else leaf
    # The one row more that the padded minibatch has is no client's: it is left out of the
    # comparison.
    return {"gradient": gradient, "logits": logits[: ROWS - 1], "buffers": changes}


def _inputs(net: Net, client: int) -> tuple[Tree, Tree, Tensor]:
    """Return parameters, buffers and samples of a made-up client, whose parameters are its own."""
    # Rounding is then no reason to differ.
    is_small = tree.size(net.params) <= DOUBLE_UP_TO
    dtype = torch.float64 if is_small and _computes_in_double(net) else torch.float32
    params = tree.map(lambda leaf: leaf * (1 + 0.01 * client), _convert(net.params, dtype))
    x = made_up_samples(net.parts.sample, ROWS, SEED + client)
    return params, _convert(net.buffers, dtype), _convert(x, dtype)


def _convert(values: Tree, dtype: torch.dtype) -> Tree:
    """Return copies of tensors, floating-point ones of another type."""
    return tree.map(
        lambda leaf: leaf.to(dtype if leaf.is_floating_point() else leaf.dtype, copy=True), values
    )


def _computes_in_double(net: Net) -> bool:
    """Return whether a network computes in float64, as those with float32 constants do not."""
    bound = net.bind({"main": _convert(net.buffers, torch.float64)})
    x = _convert(made_up_samples(net.parts.sample, ROWS), torch.float64)
    try:
        with torch.no_grad(), ConstantDraws(), seeded_process(SEED):
            bound(_convert(net.params, torch.float64), x)
    except Exception:
        return False
    return True


def _float_type(params: Tree) -> torch.dtype:
    """Return the type of the parameters that are no integers."""
    return next(leaf.dtype for leaf in tree.leaves(params) if leaf.is_floating_point())


def _agree(result: Tree, other_result: Tree) -> bool:
    """Return whether two clients' results are equal but for rounding."""
    for a, b in zip(tree.leaves(result), tree.leaves(other_result), strict=True):
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return False
            continue
        largest = float(a.abs().max()) if a.numel() else 0.0
        if not torch.allclose(
            a, b.to(a.dtype), rtol=1e-3, atol=1e-5 * (1 + largest), equal_nan=True
        ):
            return False
    return True


class ConstantDraws(TorchDispatchMode):
    """Make every random operation of torch return a constant."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Vectorised and plain calls draw other numbers; constants leave what is computed with them.
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        output = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return output
        if name == "randperm":
            # Of all orders the one in which padding, which comes last, changes what is first.
            return output.sort(descending=True).values
        if isinstance(output, Tensor):
            constant = 1.0 if name.startswith("bernoulli") else 0.5
            output.fill_(constant if output.is_floating_point() else 0)
        return output
