"""A run folder in a store: brought down at the start, and uploaded in the background while the run goes on."""
