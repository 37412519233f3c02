"""What a run leaves behind: its directory, and callbacks (terminal, log file, loggers) that hear of
it while it runs.

Nothing here knows methods, data or the engine: rows and summaries are plain mappings. `columns` and
`rounds`, which say what rounds.csv holds and read it, and `digests`, by which files are known, load
no torch.
"""
