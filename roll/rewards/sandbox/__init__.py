"""Runs programs that the policy wrote, isolated from the machine."""
