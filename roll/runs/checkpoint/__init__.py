"""Atomic checkpoints: write, verify, find, restore, rotate."""
