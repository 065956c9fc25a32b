"""Evaluates a run, one of its checkpoints, or any model on held-out prompts, with confidence intervals."""
