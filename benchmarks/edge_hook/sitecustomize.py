"""Imported by every Python process of a run of `edge_faults.py`: prepares the faults that strike inside functions."""

from benchmarks.edge_strikes import install

install()
