"""SubFLOT (CVPR 2026)."""
