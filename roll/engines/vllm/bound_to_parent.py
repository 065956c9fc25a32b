"""Binds the process that imports this module to its parent. Only the fork server of `fork_server.py` imports it.

The only own code that a fork server runs is that of the modules that it imports. Without this, it would outlive a
killed parent for as long as a process that it forked lives.

Also stops garbage collection for the imports, as `roll.system.imports` does, and finds the place of the process's
title. Later, if the first variable of the environment has changed, setproctitle no longer finds it, and vLLM's engine
would have no title.
"""

import gc
import os

from setproctitle import getproctitle

from roll.system.orphans import die_with

gc.disable()
die_with(os.getppid())
getproctitle()
