"""The visible output of a run: metrics, samples, the live view, the report and the driver's log."""
