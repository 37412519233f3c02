"""FedSPU (AAAI 2025)."""
