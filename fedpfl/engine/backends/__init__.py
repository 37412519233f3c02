"""Backends: they answer calls about clients, and know jobs and participation but no rounds."""
