"""Every key of an experiment, typed and described. `docs/configuration.md` is generated from this room.

Keys and defaults follow ROLL where ROLL has them. A checked config is frozen; nothing is filled in behind
the user's back, so a field that is None means "derived in the plan", and its description says from what.
Imports neither torch nor ray, so that a dry run is instant.
"""
