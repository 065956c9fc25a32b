"""Builds a Ray cluster from a list of hosts."""
