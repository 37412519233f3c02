"""A run's files and followers: its directory, and callbacks (terminal, log file, loggers).

The room knows neither methods nor the engine. Reports import `columns`, `rounds` and `digests`, which
load no torch.
"""
