"""Loads a checked, frozen configuration from a command line and files, and checks this machine for what it names."""
