"""Binds the process that imports this module to its parent. Only the fork server of `fork_server.py` imports it.

A fork server runs no code of its user's but the modules that it imports, and it would stay while a process that it
forked lives, even after its own parent was killed.
"""

import os

from roll.system.orphans import die_with

die_with(os.getppid())
