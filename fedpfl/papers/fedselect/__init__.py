"""FedSelect (CVPR 2024)."""
