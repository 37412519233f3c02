"""What one client does in a round: its hooks, its data and its steps.

The room knows no files, no processes and no backend: those import it, and never the other way.
"""
