"""FedYogi: Yogi at the server."""

from dataclasses import dataclass

from fedpfl.methods.fedadam import FedAdam


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedYogi: FedAdam, but for v (Reddi et al., ICLR 2021, arXiv:2003.00295).

    v <- v - (1 - beta2) D^2 sign(v - D^2) changes by D^2 for any v, so v forgets a large change
    less quickly.
    """

    def _second_moment(self, v, square):
        """Return v <- v - (1 - beta2) D^2 sign(v - D^2)."""
        return v - (1 - self.beta2) * square * (v - square).sign()
