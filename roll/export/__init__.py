"""From a run's checkpoint to what other tools and other machines load."""
