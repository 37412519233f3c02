"""FML: each client's network and a common one learn from each other."""

from dataclasses import dataclass

from fedpfl.ground.ranges import Proportion
from fedpfl.methods.shared.common import CommonBeside
from fedpfl.methods.shared.distillation import kl_divergence


@dataclass(frozen=True)
class FML(CommonBeside):
    """FML, federated mutual learning (Shen et al., 2020, arXiv:2006.16765).

    On the same minibatches a client trains its private network f on alpha CE(f) + (1 - alpha)
    KL(g || f), and the common one g, the paper's meme, on beta CE(g) + (1 - beta) KL(f || g), the
    first of each pair being given as a teacher. g goes up and is averaged (official code and
    HtFLlib: with equal weights); clients are evaluated by f.

    alpha, beta: the official code's; HtFLlib's are 1, with which nothing is learnt from each other.
        Its KL is divided by the number of classes too, and has a gradient in both networks.
    """

    alpha: Proportion = 0.5
    beta: Proportion = 0.5

    mixes_samples = ""
    needs_classes = "it distils probabilities of classes"
    server_sees = "mean of uploads"
    takes_kinds = True

    def loss(self, server, client, net, params, batch):
        """Return both networks' objectives, which have no common parameter."""
        own = net(params["model"], batch.x)
        common = net.common(params["common"], batch.x)
        to_common = batch.mean(kl_divergence(common.detach(), own))
        to_own = batch.mean(kl_divergence(own.detach(), common))
        own_loss = self.alpha * batch.loss(own) + (1 - self.alpha) * to_common
        return own_loss + self.beta * batch.loss(common) + (1 - self.beta) * to_own

    def evaluated(self, server, client, params):
        """Return the client's own network."""
        return params["model"]
