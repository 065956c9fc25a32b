"""A list of hosts to a Ray cluster."""
