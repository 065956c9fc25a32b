"""Code inside the sandbox. It imports the standard library and itself: the rest of roll is not mounted."""
