"""Converts a run's checkpoint for other tools and other machines."""
