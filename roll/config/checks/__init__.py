"""Checks that keys which the schema accepts individually also fit together. Imports none of the libraries that the keys
configure.
"""
