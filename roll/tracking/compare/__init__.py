"""Runs beside each other: what was set differently, and what came of it."""
