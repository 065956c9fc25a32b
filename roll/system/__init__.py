"""Ties processes, folders and memory to their owners, so that nothing outlives its owner."""
