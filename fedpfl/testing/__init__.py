"""Promises of methods, networks, data sets and partitions, for the tests of this package and of plugins."""
