"""Training steps that hide single samples: each one's gradient is clipped, their sum is noised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedpfl.engine.training.sgd import per_client_shape
from fedpfl.engine.training.train_plan import TrainPlan
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch, Method

Objective = Callable[[list[Tensor], Batch], Tensor]


def require_protectable(method: Method, plan: TrainPlan) -> None:
    """Raise FedpflError for a plan with steps that see more than gradients of single samples."""
    opening = f"privacy=sample and {type(method).__name__}:"
    for phase in plan.phases:
        if phase.step:
            raise FedpflError(f"{opening} it makes its own steps, whose gradients nobody clips")
        if phase.after_gradient:
            raise FedpflError(f"{opening} it looks at gradients (after_gradient) beside the noise")
    if method.mixes_samples and not (plan.tuned and type(method).predict is Method.predict):
        raise FedpflError(f"{opening} {method.mixes_samples}, so that no gradient is one sample's")


def sum_clipped_gradients(
    objective: Objective,
    leaves: list[Tensor],
    masks: list[Tensor | None],
    batch: Batch,
    clip: float,
) -> list[Tensor]:
    """Return the sum of a minibatch's gradients, each sample's scaled down to length `clip`.

    Args:
        objective: The loss of a minibatch; it is asked for one sample at a time.
        leaves: Differentiate the loss by these.
        masks: By leaf, boolean; only entries under them count and are in the sum.
        batch: The samples, those of weight 0 apart.
        clip: The longest gradient, by its L2 norm over all leaves; perhaps infinite.
    """
    weight = batch.samples
    fields = {
        name: field
        for name, field in batch._asdict().items()
        if field is not None and name != "weight"
    }

    def differentiate_sample(fields: dict[str, Tensor]) -> list[Tensor]:
        rows = {name: field[None] for name, field in fields.items()}
        return grad(objective)(leaves, Batch(**rows))

    gradients = vmap(differentiate_sample, randomness="different")(fields)
    for i, mask in enumerate(masks):
        if mask is not None:
            gradients[i] = torch.where(mask, gradients[i], 0.0)

    # ---- One factor a sample; a gradient that is not finite must not reach the sum.
    squares = [tree.as_matrix(gradient).square().sum(1) for gradient in gradients]
    norms = torch.stack(squares).sum(0).sqrt()
    is_counted = norms.isfinite() & (weight > 0)
    factors = (clip / norms).clamp(max=1.0)
    sums = []
    for gradient in gradients:
        scaled = gradient * per_client_shape(factors, gradient)
        sums.append(torch.where(per_client_shape(is_counted, gradient), scaled, 0.0).sum(0))
    return sums


def require_no_record(record: Tree) -> None:
    """Raise FedpflError for a loss that leaves values of samples."""
    if record:
        raise FedpflError(
            "privacy=sample: the method's loss leaves values of single samples beside it, which no"
            " noise hides; choose another method"
        )


@contextmanager
def explaining_failure() -> Iterator[None]:
    """Raise FedpflError for a network or loss without gradients by sample."""
    try:
        yield
    except RuntimeError as error:
        raise FedpflError(
            "privacy=sample: torch.func gives no gradients of single samples for this network and"
            f" method ({error_text(error)[:160]}); choose others"
        ) from error
