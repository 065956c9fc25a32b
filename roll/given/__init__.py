"""Python objects in a configuration: written into the run folder as files, so that a configuration names them."""
