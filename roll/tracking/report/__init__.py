"""Pages that show a run, or several runs beside each other."""
