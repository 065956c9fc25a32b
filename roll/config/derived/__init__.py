"""Values derived from the keys, each computed in one place: ranks, batches, ratios, corrections, the shape of a model."""
