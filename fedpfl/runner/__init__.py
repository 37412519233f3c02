"""Take a run from its first round to its last, from the command line and from Python."""
