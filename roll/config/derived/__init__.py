"""What follows from the keys, computed in one place each: ranks, batches, ratios, corrections, the shape of a model."""
