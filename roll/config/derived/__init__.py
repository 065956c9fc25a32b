"""Values derived from the configuration: ranks, batch sizes, ratios, corrections, shapes of models. Each is computed in
one place.
"""
