"""Code that runs inside the sandbox. Imports Python's standard library alone, and itself relatively: the folder is mounted without roll."""
