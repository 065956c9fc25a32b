"""The bound of the adaptive KL controller, which its function in `roll/algorithms/kl.py` and the checks share."""

from __future__ import annotations

LARGEST_ERROR = 0.2
"""A step's proportional error is clipped to this magnitude, so that a step changes the weight by at most
this x responses / kl_horizon."""
