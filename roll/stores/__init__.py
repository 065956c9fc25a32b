"""Object stores and shared folders, by fsspec: run folders and models that outlive the machine."""
