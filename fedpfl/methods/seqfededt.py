"""SeqFedEDT: a model goes from client to client; each puts back some personal entries."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import Proportion
from fedpfl.ground.tree import Known
from fedpfl.methods.shared import importance
from fedpfl.methods.shared.by_mask import PersonalByMask
from fedpfl.methods.shared.method import Turn

SCORES = {
    "difference": importance.movement_score,
    "squared": importance.obp_score,
    "importance": importance.published_obp_score,
}


@dataclass(frozen=True)
class SeqFedEDT(PersonalByMask):
    """SeqFedEDT (Du et al., IEEE Trans. Mobile Computing 2025): sequential learning, decoupled by
    element.

    The cohort takes turns. A client compares the model w that it receives with its own last model
    theta_i, takes the entries with a score above the q-quantile from theta_i and the rest
    from w, trains all of them, keeps the result as theta_i and passes it on. theta_i is at first
    the initial model. A client is evaluated by theta_i with its own BatchNorm statistics; one that
    was never sampled, by the travelling model. The passed model holds the last client's personal
    entries too, as in the official code.

    score: `squared` = (w - theta_i)^2 (the official code), `difference` = |w - theta_i|, which
        selects the same, or `importance` = |theta_i (w - theta_i)|. They are ranked as they are:
        rescaling cannot change the selection.
    q: quantile in [0, 1]; 1 is plain sequential learning.
    classifier_only: only the classifier's entries can be personal; q then counts over these.
    """

    score: Literal["difference", "squared", "importance"] = "squared"
    q: Proportion = 0.9995
    classifier_only: bool = False

    _key: ClassVar[str] = "scored"

    server_sees = "each upload"

    def buffers(self):
        """Keep the statistics with the client."""
        return {"main": "local"}

    def init(self, params, parts):
        """Give the server the travelling model w, the client theta_i in two parts.

        These are the scored entries, and the rest.
        """
        names = parts.head if self.classifier_only else params
        scored = tree.select(params, names)
        return params, {"scored": scored, "rest": tree.drop(params, scored)}

    def turns(self, played, cohort, clients, generator):
        """Return one client after another, in an order drawn anew each round."""
        order = torch.randperm(len(cohort), generator=generator)
        return [Turn([cohort[position]]) for position in order.tolist()]

    def prepare(self, server, client):
        """Choose the personal entries."""
        theta_i = client["scored"]
        w = tree.select(server, theta_i)
        scores = SCORES[self.score](theta_i, w)
        return {**client, "mask": importance.mask_above_quantile(scores, self.q)}

    def download(self, server, client):
        """Return w, which comes from the client before.

        It was that client's upload, and is counted only there.
        """
        return Known(server)

    def finish(self, server, client, start, params):
        """Pass the trained model on, and keep it."""
        theta_i = {part: tree.select(params, client[part]) for part in ("scored", "rest")}
        return params, theta_i

    def personal(self, server, client):
        """Return theta_i; without one, w."""
        theta_i = {**server, **client["rest"], **client["scored"]}
        return tree.where(client["participated"], theta_i, server)
