"""Checkpoints that are complete or absent: write, verify, find, restore, rotate."""
