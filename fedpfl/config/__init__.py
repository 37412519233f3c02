"""Turn words of the command line into a checked plan, and that into the run that it describes."""
