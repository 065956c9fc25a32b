"""Code that runs inside the sandbox. It only imports Python's standard library and itself, because the folder is mounted without roll."""
