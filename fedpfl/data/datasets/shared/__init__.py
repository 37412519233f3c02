"""What data sets share: where files lie, what a reader returns, file formats."""
