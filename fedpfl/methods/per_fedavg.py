"""Per-FedAvg: a model from which one step on a client's data leads far."""

from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import ClassVar, Literal

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative, Positive, WholeNumber
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.method import Method, Phase, equal_shares


@dataclass(frozen=True)
class PerFedAvg(Method):
    """Per-FedAvg (Fallah, Mokhtari and Ozdaglar, NeurIPS 2020, arXiv:2002.07948), with g(w; D) the
    gradient on D.

    A step takes as many minibatches as it needs: u = w - inner_lr g(w; D), h = g(u; D') and w <- w
    - outer_lr d, where `fo`: d = h, `hf`: d = h - inner_lr (g(w + delta h; D'') - g(w - delta h;
    D'')) / (2 delta), a Hessian-vector product. The rest of an epoch is skipped, so a client
    with fewer than 2 (`hf`: 3) minibatches does not train. All steps
    are plain: local.lr and local.momentum have no part in them, nor has local.weight_decay, except
    in fine-tuning. The mean is uniform. BatchNorm statistics move by D' at u alone.

    The result is the model AFTER adaptation, for all clients alike: with eval.finetune_epochs, the
    `after` columns, from plain gradient steps of size inner_lr; `before` is the meta-model, which
    is no client's result. The paper adapts
    by one step: with adapt_steps=1 `before` is that. A round's own columns evaluate the meta-model,
    before and after its training.

    inner_lr, outer_lr: alpha and beta of the paper, where alpha is 0.01 or 0.001. delta: which it
        leaves open; 0.001 as in a common port.
    adapt_steps: gradient steps on the client's first minibatches before it is evaluated.
    """

    own_steps: ClassVar[bool] = True

    version: Literal["fo", "hf"] = "fo"
    inner_lr: NonNegative = 0.01
    outer_lr: NonNegative = 0.001
    delta: Positive = 0.001
    adapt_steps: WholeNumber = 0

    server_sees = "mean of uploads"

    def phases(self, server, client, params, epochs):
        """Take steps on D and D', and D'' for the Hessian-vector product."""
        batches = 2 if self.version == "fo" else 3
        return [Phase(epochs, step=self._step, batches=batches)]

    def _step(self, server, client, net, params, batches):
        """Move the meta-model; the loss is that of the adapted model on D'."""
        gradient = partial(
            net.gradient,
            partial(self.loss, server, client),
        )

        # ---- u = w - inner_lr g(w; D); D does not move BatchNorm statistics.
        statistics = net.buffers
        inner_gradient, _ = gradient(params, batches[0])
        adapted = _take_step(params, inner_gradient, -self.inner_lr)
        net.buffers = statistics

        # ---- h = g(u; D'), which alone moves them.
        direction, loss = gradient(adapted, batches[1])
        statistics = net.buffers

        # ---- d = h - inner_lr (g(w + delta h; D'') - g(w - delta h; D'')) / (2 delta)
        if self.version == "hf":
            params_ahead = _take_step(params, direction, self.delta)
            params_behind = _take_step(params, direction, -self.delta)
            ahead, _ = gradient(params_ahead, batches[2])
            behind, _ = gradient(params_behind, batches[2])
            scale = self.inner_lr / (2 * self.delta)
            direction = tree.map(
                lambda h, a, b: h - scale * (a - b),
                direction,
                ahead,
                behind,
            )
        net.buffers = statistics
        return _take_step(params, direction, -self.outer_lr), loss

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average the meta-models uniformly."""
        return tree.mean(uploads, equal_shares(weight)), clients

    def before_evaluation(self, server, client, net, shard):
        """Return the meta-model after `adapt_steps` plain steps, on as many epochs as they take."""
        if not self.adapt_steps:
            return {}
        # One batch an epoch is the least, so that many epochs are always enough.
        epochs = (shard.batches("main", epoch) for epoch in range(self.adapt_steps))
        batches = chain.from_iterable(epochs)
        objective = partial(self.loss, server, client)
        params = server
        for batch in islice(batches, self.adapt_steps):
            gradient, _ = net.gradient(objective, params, batch)
            params = _take_step(params, gradient, -self.inner_lr)
        return {"adapted": params}

    def personal(self, server, client):
        """Return the adapted model; without steps of adaptation, the meta-model."""
        return client.get("adapted", server)

    def finetuning(self, params, parts, epochs):
        """Adapt: plain gradient descent with the inner step size."""
        if not self.inner_lr:
            return []
        return [Phase(epochs, sgd={"lr": self.inner_lr, "momentum": 0.0})]


def _take_step(params: Tree, direction: Tree, length: float) -> Tree:
    """Return the parameters moved by `length` times the direction.

    The step is rounded as SGD's steps are, and has the parameters' memory layout.
    """
    return tree.map(
        lambda p, d: p.clone().add_(d, alpha=length),
        params,
        direction,
    )
