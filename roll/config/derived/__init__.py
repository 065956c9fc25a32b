"""Values derived from the configuration, each in one place: ranks, batch sizes, ratios, shapes of models."""
