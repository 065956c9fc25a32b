"""From a command line and files to a checked, frozen configuration, and what this machine holds of what it names."""
