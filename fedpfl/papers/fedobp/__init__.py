"""FedOBP (arXiv:2604.16574)."""
