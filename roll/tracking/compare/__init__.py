"""Compares runs: their different settings and their results."""
