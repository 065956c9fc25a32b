"""The output of a run for people: metrics, samples, the live view, the report and the driver's log."""
