"""The bound of the adaptive KL controller, shared by `roll/algorithms/kl.py` and the configuration checks."""

from __future__ import annotations

LARGEST_ERROR = 0.2
"""Largest magnitude of a step's proportional error. A step changes the coefficient by at most the fraction
LARGEST_ERROR * responses / kl_horizon."""
