"""Runs programs of the policy isolated from the machine."""
