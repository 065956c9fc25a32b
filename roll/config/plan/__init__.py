"""The plan of a checked configuration: its memory, and how it is shown."""
