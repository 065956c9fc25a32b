"""How often a model is right on held-out prompts, with intervals: of a run, of one of its checkpoints, or of any model."""
