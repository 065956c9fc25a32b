"""Checks that keys which are accepted individually also fit together. Imports none of the libraries they configure."""
