"""The schema of an experiment, its loader and its plan. Imports neither torch nor ray."""
