"""Containers in which an environment runs commands: images, what holds a container, and the pool of ready ones."""
