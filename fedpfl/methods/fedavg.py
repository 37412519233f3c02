"""FedAvg: one model for all."""

from dataclasses import dataclass, field
from typing import Literal

from fedpfl.methods.shared.method import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """Federated averaging with sample weights (McMahan et al., AISTATS 2017, arXiv:1602.05629).

    Shares are normalised over the cohort. FedAvg+FT is FedAvg after `eval.finetune_epochs` (arXiv:2002.04758).

    statistics: BatchNorm's running ones: `aggregate` at the server, or `local`: they never leave a client.
    """

    statistics: Literal["aggregate", "local"] = field(default="aggregate", kw_only=True)

    def buffers(self):
        """Average BatchNorm statistics, or leave them where they are."""
        return {"main": self.statistics}
