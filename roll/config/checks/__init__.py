"""Checks keys against each other that the schema accepts one by one. Imports none of the libraries concerned."""
