"""Runs a candidate's program where it can do no harm."""
