"""Local training: what one client does in a round, its steps and optimizer, and checks of what hooks return."""
