"""FedFomo: each client mixes the models that help it most on its validation samples."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative, Proportion, WholeNumber
from fedpfl.ground.tree import Agreed
from fedpfl.methods.shared.pool import (
    ModelPool,
    choose_candidates,
    gain_per_distance,
    validation_loss,
)


@dataclass(frozen=True)
class FedFomo(ModelPool):
    """FedFomo (Zhang et al., ICLR 2021, arXiv:2012.08565): first order model optimisation.

    th_i is a client's model after its last training, th_i^old the one that this training started
    from, L_i the mean cross-entropy on its validation samples V_i. Before it trains again it is
    sent M models th_n of other clients that trained in the last round. With its own th_i among the
    candidates,

        w_n = (L_i(th_i^old) - L_i(th_n)) / |th_n - th_i^old|,    P_in <- P_in + w_n,    w+ = max(w, 0) / sum max(w, 0),

    and training starts from sum_n w+_n th_n. Each of the M is drawn: with probability eps_t any
    client, else the one of largest P_i that is left, by lot among equals; eps_t falls from round to
    round, to 0.

    V_i are the samples that `validation` holds out of the client's training samples, fixed for the
    run (the paper: validation=0.2); no client trains on them, and a run's report of its
    validation samples is too good, as they chose the weights. A client without any keeps its own
    model.
    candidates: M. The paper's 5 (and 10) count the own model. explore, decay: eps_0, and its fall
    in a round.
    fallback: the start where no w_n is positive: th_i^old (`baseline`, as the paper and its code:
        the last training is undone) or th_i (`keep`, as FL-bench and PFLlib). candidates=0 with
        `keep` is Local-Only.
    pool: the models that are offered, those of the `last_round` (the official code) or of `all`
    that ever trained.

    A client is evaluated by th_i, as in PFLlib and FL-bench; the paper's mixed model is the one that the
    cohort's columns from before training tell of. A client that never trained has the initial
    model, and is sent no other. In FL-bench the baseline is th_i in place of th_i^old, so that the
    own weight is always 0, and V_i is drawn anew whenever a client is loaded; PFLlib never
    explores. The official code also offers averages of groups, measures distances by the L1 norm
    by default, and adds scaled weights to P. BatchNorm statistics are mixed with the
    models.
    """

    validates: ClassVar[bool] = True

    candidates: WholeNumber = 4
    explore: Proportion = 0.3
    decay: NonNegative = 0.05
    fallback: Literal["baseline", "keep"] = "baseline"
    pool: Literal["last_round", "all"] = "last_round"

    def init(self, params, parts):
        """Begin with the initial model twice, and without affinities."""
        server, client = super().init(params, parts)
        device = server["pool"].device
        old = {"model": params, "statistics": tree.to(parts.statistics, device)}
        affinity = torch.zeros_like(server["pool"], dtype=torch.float64)
        return server, {**client, "old": old, "affinity": affinity}

    def before_turn(self, server, clients, read_states, generator):
        """Choose each client's candidates; return their models, and flags that tell padding."""
        if generator is None or not self.candidates:  # clients are evaluated by their own models
            return {}

        # ---- Draw each client's candidates.
        pool = server["pool"].cpu()
        rate = self.explore - self.decay * int(server["played"])  # eps_t
        # A generator for each client, so that candidates do not depend on the rest of the cohort.
        seeds = torch.randint(2**62, (len(pool),), generator=generator).tolist()
        numbers = []
        is_candidate = []
        for number, participated, affinity in zip(
            clients["number"].tolist(),
            clients["participated"].tolist(),
            clients["affinity"].cpu(),
            strict=True,
        ):
            candidates = choose_candidates(
                pool=pool,
                affinity=affinity,
                number=number,
                count=self.candidates if participated else 0,
                rate=rate,
                generator=torch.Generator().manual_seed(seeds[number]),
            )
            missing = self.candidates - len(candidates)
            numbers += candidates + [number] * missing  # the client's own model as padding
            is_candidate.append([True] * len(candidates) + [False] * missing)

        # ---- Their models, stacked `[cohort, candidates, ...]`.
        # One read for the whole cohort: rows may lie in host memory or in files.
        states = read_states(numbers)
        models = {
            "model": states["model"],
            "statistics": states["statistics"]["main"],
            "number": states["number"],
        }
        by_client = tree.map(
            lambda leaf: leaf.unflatten(0, (-1, self.candidates)),
            models,
        )
        flags = torch.tensor(is_candidate, device=server["pool"].device)
        return {"sent": by_client, "there": flags}

    def before_training(self, server, client, net, shard):
        """Return the mixture that training starts from, the weights and the new affinities."""
        old = client["old"]
        start = {"model": client["model"], "statistics": client["statistics"]["main"]}
        affinity = client["affinity"].clone()
        gains = affinity.new_zeros(self.candidates + 1)  # w_n, that of the own model first
        if bool(client["participated"]) and len(shard.validation.y):
            # ---- Candidates: the own model, and those that were sent.
            models = {0: start}
            if self.candidates:
                for row in client["there"].nonzero()[:, 0].tolist():
                    models[1 + row] = tree.take(client["sent"], row)

            # ---- w_n = (L_i(th_i^old) - L_i(th_n)) / |th_n - th_i^old|
            old_loss = validation_loss(net, **old, shard=shard)
            for row, candidate in models.items():
                loss = validation_loss(net, candidate["model"], candidate["statistics"], shard)
                gains[row] = gain_per_distance(
                    old_loss - loss,
                    candidate["model"],
                    old["model"],
                )

            # ---- P_in <- P_in + w_n
            for row, candidate in models.items():
                if row > 0:
                    affinity[candidate["number"]] += gains[row]

            start = self._mix_models(models, gains, old)
        return {
            "begun": start,
            "affinity": affinity,
            "gains": gains.float(),
            "statistics": {"main": start["statistics"]},
        }

    def _mix_models(self, models, gains, old):
        """Return sum_n w+_n th_n, or what `fallback` says where no w_n is positive."""
        rows = list(models)
        positive = gains[rows].clamp(min=0)
        if not bool(positive.any()):
            # models[0] is the client's own.
            return old if self.fallback == "baseline" else models[0]
        # Models of weight 0 are left out: one that diverged would make the sum nan.
        helpful = positive.nonzero()[:, 0]
        helpful_models = [models[rows[i]] for i in helpful.tolist()]
        stacked = tree.stack([tree.select(model, old) for model in helpful_models])
        # w+ = max(w, 0) / sum max(w, 0)
        shares = (positive / positive.sum())[helpful].float()
        return tree.average_statistics(stacked, shares)

    def download(self, server, client):
        """Return the candidates."""
        if not self.candidates:
            return {}
        models = tree.drop(client["sent"], ["number"])
        is_candidate = client["there"]

        def expand_flags(leaf):
            shape = (-1, *[1] * (leaf.dim() - 1))
            return is_candidate.view(shape).expand(leaf.shape)

        return Agreed(models, tree.map(expand_flags, models))

    def start(self, received, client):
        """Return the mixture."""
        return client["begun"]["model"]

    def finish(self, server, client, start, params):
        """Send up the model and the weights; keep it and its start."""
        upload = {
            "model": params,
            "statistics": client["statistics"]["main"],
            "gains": client["gains"],
        }
        return upload, {"model": params, "old": client["begun"], "affinity": client["affinity"]}

    def metrics(self, server, client):
        """Return the share of the client's model in its start."""
        positive = client["gains"].clamp(min=0)
        return {"own_share": torch.where(positive.any(), positive[0] / positive.sum(), 0.0)}
