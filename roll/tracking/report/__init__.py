"""HTML pages that show one run, or compare several runs."""
