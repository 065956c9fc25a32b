"""Says what of a machine is fit for a run, and the command that mends what is not."""
