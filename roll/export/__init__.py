"""Converts a checkpoint for use by other tools, or by any number of ranks."""
