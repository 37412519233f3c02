"""Helpers of data sets: where files lie, the form of samples, file formats."""
