"""FedPURIN (arXiv:2510.16065)."""
