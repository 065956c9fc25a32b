"""Defines every key of an experiment, with type and description. `docs/configuration.md` is generated from this
package.

Keys and defaults follow ROLL if ROLL has the key. A checked configuration is frozen. A field that is None is not filled
in: its value is derived in the plan, and its description says how. The package imports neither torch nor ray, so that a
dry run is fast.
"""
