"""Translates configurations of TRL, verl and OpenRLHF into experiments of roll."""
