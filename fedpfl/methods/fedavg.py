"""FedAvg: one model for all."""

from dataclasses import dataclass

from fedpfl.methods.shared.method import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """Federated averaging with sample weights (McMahan et al., AISTATS 2017, arXiv:1602.05629).

    Shares are normalised over the cohort. FedAvg+FT is FedAvg after `eval.finetune_epochs`
    (arXiv:2002.04758).
    """
