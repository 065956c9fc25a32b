"""Checks whether a machine can run roll, and shows the command that fixes each fault."""
