"""What a checked configuration amounts to: the plan, its memory, and how it is shown."""
