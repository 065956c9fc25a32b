"""What a program may try against the sandbox that judges it. Each attempt prints ESCAPED where it succeeds, or makes a test pass that it must
fail. `python escapes.py SECRET PORT NAME...` tries them as whoever runs it, and prints a JSON object: by name, whether it succeeded.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterable

from roll.rewards.sandbox.bubblewrap import survey
from roll.rewards.sandbox.program import Ending, Job, Limits, Outcome, run

LIMITS = Limits(cpu_seconds=2, wall_seconds=20.0, memory_mib=512, disk_mib=16, output_mib=1)
CALL = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\ndef call(*a):\n    r = libc.syscall(*map(ctypes.c_long, a))\n    assert r >= 0, ctypes.get_errno()\n    return r\n"

NOT_REFUSED = re.compile(rb"ESCAPED|ModuleNotFound|ImportError|LookupError|NameError|SyntaxError|AttributeError|TypeError")
"""It succeeded, or failed for a reason that has nothing to do with the sandbox, and so shows nothing."""

FILES = {
    "read_passwd": "open('/etc/passwd').read()",
    "read_shadow": "open('/etc/shadow').read()",
    "list_home": "import os; assert os.listdir('/home') or os.listdir('/root')",
    "read_secret": "open({secret!r}).read()",
    "write_secret": "open({secret!r}, 'a').write('x')",
    "unlink_secret": "import os; os.unlink({secret!r})",
    "symlink_to_secret": "import os; os.symlink({secret!r}, '/tmp/link'); open('/tmp/link').read()",
    "hardlink_to_secret": "import os; os.link({secret!r}, '/tmp/link')",
    "path_upwards": "open('/tmp/' + '../' * 20 + {secret!r}).read()",
    "write_root": "open('/written', 'w').write('x')",
    "make_folder_at_root": "import os; os.mkdir('/made')",
    "write_harness": "import glob; open(glob.glob('/harness/**/judge.py', recursive=True)[0], 'a')",
    "write_standard_library": "import os; open(os.__file__, 'a')",
    "write_interpreter": "import sys; open(sys.executable, 'ab')",
    "read_site_packages": "import os, sysconfig; assert os.listdir(os.path.dirname(os.__file__) + '/site-packages')",
    "shared_memory_folder": "open('/dev/shm/x', 'w').write('x')",
    "shared_memory": "from multiprocessing.shared_memory import SharedMemory; SharedMemory(create=True, size=100)",
    "device_of_memory": "open('/dev/mem', 'rb').read(1)",
    "kernel_log": "open('/dev/kmsg').read(1)",
    "terminal": "open('/dev/tty')",
    "make_device": "import os, stat; os.mknod('/tmp/d', 0o600 | stat.S_IFBLK, os.makedev(8, 0))",
    "proc_environment": "open('/proc/self/environ').read()",
    "proc_of_first": "open('/proc/1/mem', 'rb')",
    "proc_root": "import os; os.listdir('/proc/1/root')",
    "sys_folder": "import os; os.listdir('/sys/class/net')",
    "cgroup": "open('/sys/fs/cgroup/cgroup.procs', 'w').write('0')",
    "chroot": "import os; os.chroot('/tmp')",
    "mount_tmpfs": CALL + "call(165, 0, 0, 0, 0, 0)",
    "remount": "import ctypes; assert ctypes.CDLL(None).mount(None, b'/', None, 32, None) == 0",
    "open_by_handle": CALL + "call(304, -100, 0, 0)",
    "overwrite_input": "import os; os.lseek(0, 0, 0); os.write(0, b'x')",
}
NETWORK = {
    "connect_to_host": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "connect_outside": "import socket; socket.create_connection(('1.1.1.1', 53), 2)",
    "resolve": "import socket; socket.getaddrinfo('example.com', 80)",
    "abstract_socket": "import socket; socket.socket(socket.AF_UNIX).connect(chr(0) + '/tmp/.X11-unix/X0')",
    "raw_socket": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "listen": "import socket; socket.create_server(('127.0.0.1', 0))",
    "other_abi_socket": "import ctypes; assert ctypes.CDLL(None).syscall(0x40000000 + 41, 2, 1, 0) >= 0",
}
PROCESSES = {
    "fork": "import os; os.fork() or os._exit(0)",
    "fork_bomb": "import os\nfor _ in range(1000): os.fork()",
    "vfork": CALL + "call(58) or call(60, 0)",
    "clone": CALL + "call(56, 17, 0, 0, 0, 0) or call(60, 0)",
    "clone3": CALL + "b = ctypes.create_string_buffer(88); call(435, ctypes.addressof(b), 88) or call(60, 0)",
    "other_abi_fork": "import ctypes; r = ctypes.CDLL(None).syscall(0x40000000 + 57); assert r >= 0",
    "run_shell": "import os; assert os.system('true') == 0",
    "run_interpreter": "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)",
    "spawn": "import os, sys; os.posix_spawn(sys.executable, [sys.executable], {{}})",
    "exec": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(\"ESCAPED\")'])",
    "multiprocessing": "import multiprocessing as m; p = m.get_context('fork').Process(target=int); p.start(); p.join()",
    "daemon": "import os\nif os.fork() == 0:\n    os.setsid()\n    os.fork()",
    "zombies": "import os\nfor _ in range(100):\n    if os.fork() == 0: os._exit(0)",
    "thread_bomb": "import threading, time\nfor n in range(1000): threading.Thread(target=time.sleep, args=(3,), daemon=True).start()",
    "trace_parent": CALL + "import os; call(101, 16, os.getppid() or 1, 0, 0)",
    "trace_first": CALL + "call(101, 0x4206, 1, 0, 0)",
    "read_memory": CALL + "call(310, 1, 0, 0, 0, 0, 0)",
    "kill_parent": "import os; os.kill(os.getppid() or 1, 9)",
    "kill_first": "import os; os.kill(1, 9)",
    "kill_all": "import os; os.kill(-1, 9)",
    "kill_group": "import os; os.killpg(0, 9)",
    "kill_thread": CALL + "call(234, 1, 1, 9)",
    "pidfd": "import os; os.pidfd_open(1)",
    "take_descriptor": CALL + "call(438, 3, 0, 0)",
    "limit_others": "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))",
}
RIGHTS = {
    "become_root": "import os; os.setuid(0)",
    "new_user_namespace": CALL + "call(272, 0x10000000)",
    "new_mount_namespace": CALL + "call(272, 0x20000)",
    "enter_namespace": CALL + "call(308, 0, 0)",
    "bpf": CALL + "call(321, 0, 0, 0)",
    "keyring": CALL + "call(250, 0, -3, 1)",
    "io_uring": CALL + "b = ctypes.create_string_buffer(200); call(425, 4, ctypes.addressof(b))",
    "userfaultfd": CALL + "call(323, 1)",
    "performance_counters": CALL + "b = ctypes.create_string_buffer(200); call(298, ctypes.addressof(b), 0, -1, -1, 0)",
    "host_name": "import socket; socket.sethostname('x')",
    "clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
    "priority": "import os; os.nice(-5)",
    "raise_limits": "import resource; resource.setrlimit(resource.RLIMIT_CPU, (100, 100))",
    "raise_memory": "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "old_abi": (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))  # getpid by int 0x80\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()"
    ),
}
RESOURCES = {
    "memory": "b = bytearray(1 << 30); b[::4096] = b'x' * len(b[::4096])",
    "memory_map": "import mmap; mmap.mmap(-1, 1 << 30)",
    "memory_of_threads": "import threading\nkept = []\nfor _ in range(30):\n    t = threading.Thread(target=lambda: kept.append(bytearray(1 << 26))); t.start(); t.join()\nassert len(kept) == 30",
    "memory_file": "import os; os.memfd_create('x')",
    "system_v_memory": CALL + "call(29, 0, 1 << 24, 0o1600)",
    "message_queue": CALL + "call(68, 0, 0o1600)",
    "fill_disk": "for n in range(64): open(f'/tmp/{{n}}', 'wb').write(bytes(1 << 20))",
    "large_file": "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); f = open('/tmp/f', 'wb', buffering=0); f.seek(1 << 30); f.write(b'x')",
    "open_files": "kept = [open('/dev/null') for _ in range(1000)]",
    "lock_memory": "import ctypes; b = ctypes.create_string_buffer(1 << 24); assert ctypes.CDLL(None).mlock(b, 1 << 24) == 0",
    "attributes": "import os; open('/tmp/f', 'w'); os.setxattr('/tmp/f', 'user.x', bytes(1000))",
    "environment": "import os; assert any('SECRET' in name for name in os.environ) or len(os.environ) > 8",
    "descriptors": "import os\nfound = []\nfor n in range(3, 1024):\n    try: os.fstat(n); found.append(n)\n    except OSError: pass\nassert found",
    "arguments": "import sys; assert any('EXPECTED' in a for a in sys.argv + sys.orig_argv)",
    "search_memory": "import gc\nassert any(isinstance(v, (str, bytes)) and ''.join(map(chr, [76, 65, 84, 69, 82])) in repr(v) for o in gc.get_objects() for v in (list(o.values()) if isinstance(o, dict) else o if isinstance(o, (list, tuple)) else ()))",
}
"""Sources; braces that are not for `secret` and `port` are doubled."""
ENDLESS = {
    "endless": "while True: pass",
    "ignores_signals": "import signal\nfor s in (signal.SIGXCPU, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "busy_threads": "import threading\ndef spin():\n    while True: pass\nfor _ in range(8): threading.Thread(target=spin).start()",
    "floods_output": "while True: print('x' * 10000)",
    "floods_complaints": "import sys\nwhile True: sys.stderr.write('x' * 10000)",
    "endless_compilation": "x = " + "(" * 90 + "1" + ")" * 90 + "\n" + "y = [0] * 10**7 * 100",
    "compile_bomb": "eval(compile('-' * 3_000_000 + '1', 'x', 'eval'))",
    "endless_exit": "import atexit\ndef spin():\n    while True: pass\natexit.register(spin)",
}
"""These may do nothing but end without a verdict that helps them, and leave nothing behind."""
SLEEPING = {
    "sleeps": "import time; time.sleep(1000)",
    "closes_and_sleeps": "import os, time; [os.close(n) for n in range(3)]; time.sleep(1000)",
}

LIAR = "class Liar:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    def __lt__(self, other): return True\n    def __gt__(self, other): return True\n    def __le__(self, other): return True\n    def __ge__(self, other): return True\n    def __bool__(self): return True\n    def __sub__(self, other): return 0\n    def __rsub__(self, other): return 0\n    def __abs__(self): return 0\n    def __hash__(self): return 0\n    def __float__(self): return 5.0\n"
FIND_LINK = "import gc\nfrom roll.rewards.sandbox.inside.link import Link\nlink = next(o for o in gc.get_objects() if type(o) is Link)\n"
EQUALS = "assert f(2) == 5"
FORGERIES: dict[str, tuple[str, str]] = {
    "exits": ("import sys\ndef f(x): sys.exit(0)", EQUALS),
    "exits_at_import": ("import sys\nsys.exit(0)", EQUALS),
    "ends_process": ("import os\ndef f(x): os._exit(0)", EQUALS),
    "ends_process_at_import": ("import os\nos._exit(0)", EQUALS),
    "ends_process_where_errors_are_caught": ("import os\ndef f(x): os._exit(0)", "try:\n    assert f(2) == 5\nexcept Exception:\n    pass"),
    "raises_system_exit": ("def f(x): raise SystemExit(0)", EQUALS),
    "raises_stop_iteration": ("def f(x): raise StopIteration", "assert all(map(lambda p: f(p[0]) == p[1], [(2, 5)]))"),
    "raises_interrupt": ("def f(x): raise KeyboardInterrupt", EQUALS),
    "raises_skip": ("import unittest\ndef f(x): raise unittest.SkipTest('no')", "def test_f():\n    assert f(2) == 5"),
    "liar": (LIAR + "def f(x): return Liar()", EQUALS),
    "liar_on_the_right": (LIAR + "def f(x): return Liar()", "assert 5 == f(2)"),
    "liar_in_list": (LIAR + "def f(x): return [Liar()]", "assert f(2) == [5]"),
    "liar_in_options": (LIAR + "def f(x): return Liar()", "assert f(2) in [5, 6]"),
    "liar_compared": (LIAR + "def f(x): return Liar()", "assert 4 < f(2) < 6"),
    "liar_near": (LIAR + "def f(x): return Liar()", "assert abs(f(2) - 5) < 0.1"),
    "liar_near_reflected": (LIAR + "def f(x): return Liar()", "assert abs(5 - f(2)) < 0.1"),
    "liar_approx": (LIAR + "def f(x): return Liar()", "import pytest\nassert f(2) == pytest.approx(5)"),
    "liar_unittest": (
        LIAR + "def f(x): return Liar()",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2), 5)",
    ),
    "lying_int": ("class I(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef f(x): return I(3)", EQUALS),
    "lying_list": ("class L(list):\n    def __eq__(self, other): return True\ndef f(x): return L()", "assert f(2) == [5]"),
    "lying_class": (
        "class M(type):\n    def __eq__(self, other): return True\n    __hash__ = type.__hash__\nclass C(metaclass=M): pass\ndef f(x): return C",
        EQUALS,
    ),
    "mock_any": ("from unittest.mock import ANY\ndef f(x): return ANY", EQUALS),
    "patched_builtins": (
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.all = lambda x: True\ndef f(x): return 1",
        "assert abs(f(2) - 5) < 1 and all([f(2) == 5])",
    ),
    "shadowed_builtins": (
        "def abs(x): return 0\ndef all(x): return True\ndef f(x): return 1",
        "assert abs(f(2) - 5) < 1 and all([f(2) == 5])",
    ),
    "imported_shadow": (
        "from operator import truth as abs\nfrom unittest.mock import MagicMock as isinstance\ndef f(x): return 1",
        "assert abs(f(2) - 5) < 0.5",
    ),
    "patched_assertion": ("import builtins\nclass Silent(Exception): pass\nbuiltins.AssertionError = Silent\ndef f(x): return 1", EQUALS),
    "patched_unittest": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef f(x): return 1",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2), 5)",
    ),
    "patched_pytest": (
        "import sys, types\nsys.modules['pytest'] = types.SimpleNamespace(approx=lambda x: 1)\ndef f(x): return 1",
        "import pytest\nassert f(2) == pytest.approx(5)",
    ),
    "own_pytest_file": (
        "open('/tmp/pytest.py', 'w').write('approx = lambda x: 1')\nimport sys; sys.path.insert(0, '/tmp')\ndef f(x): return 1",
        "import pytest\nassert f(2) == pytest.approx(5)",
    ),
    "own_module_file": (
        "open('/tmp/math.py', 'w').write('isclose = lambda *a: True')\ndef f(x): return 1",
        "import math\nassert math.isclose(f(2), 5)",
    ),
    "prints_verdict": ("print('passed')\nprint('OK')\ndef f(x): print('passed'); return 1", EQUALS),
    "prints_at_end": (
        "class D:\n    def __del__(self): print('passed')\nd = D()\nimport atexit; atexit.register(print, 'passed')\ndef f(x): return 1",
        EQUALS,
    ),
    "writes_everywhere": (
        "import os\nfor n in range(64):\n    try: os.write(n, b'passed\\n')\n    except OSError: pass\ndef f(x): return 1",
        EQUALS,
    ),
    "answers_itself": (
        FIND_LINK.replace("link = ", "def find(): return ")
        + "def f(x):\n    find()._channel.send(['answer', 'value', [True], []]); return 1",
        EQUALS,
    ),
    "builds_a_liar_there": (
        FIND_LINK.replace("link = ", "def find(): return ")
        + "def f(x):\n    link = find()\n    made = link.request('call', type, ['X', (), {'__eq__': bool}], {})\n    return made()",
        EQUALS,
    ),
    "reads_globals_there": (
        FIND_LINK.replace("link = ", "def find(): return ") + "def f(g): return find().request('get', g, '__globals__')['EXPECTED']",
        "EXPECTED = 5\nassert f(lambda: 0) == 5",
    ),
    "reads_frames_there": ("def f(g): return g.gi_frame.f_globals['EXPECTED']", "EXPECTED = 5\ndef gen(): yield 1\nassert f(gen()) == 5"),
    "reads_code_there": ("def f(g): return max(c for c in g.__code__.co_consts if c)", "assert f(lambda: 5) == 5"),
    "reads_closure_there": (
        "def f(g): return g.__closure__[0].cell_contents",
        "def make(v): return lambda: v and 0\nassert f(make(5)) == 5",
    ),
    "walks_frames": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for v in frame.f_locals.values():\n            if isinstance(v, dict) and chr(61) * 2 + chr(32) + chr(53) in str(v): return 5\n        frame = frame.f_back",
        EQUALS,
    ),
    "searches_memory": (
        "import gc\ndef f(x): return 5 if any('f(2) ' + chr(61) * 2 in str(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))) else 0",
        EQUALS,
    ),
    "search_test_file": (
        "import os\ndef f(x):\n    for n in range(3, 200):\n        try:\n            if b'== 5' in os.pread(n, 100000, 0): return 5\n        except OSError: pass",
        EQUALS,
    ),
    "kills_the_judge": (
        "import os\ndef f(x):\n    for p in range(1, 50):\n        try: os.kill(p, 9)\n        except OSError: pass\n    return 1",
        EQUALS,
    ),
    "closes_the_link": ("import os\ndef f(x): os.close(3)", "try:\n    f(2)\nexcept Exception:\n    pass"),
    "too_large_an_answer": ("def f(x): return 'x' * (1 << 25)", EQUALS),
    "nested_answer": ("def f(x):\n    v = []\n    for _ in range(100000): v = [v]\n    return v", EQUALS),
    "hangs": ("def f(x):\n    while True: pass", EQUALS),
    "response_is_code": ("'''+str(1/0)+'''", ""),
}
"""By name, a program and a test that it must fail. Of the last one the test is of its text."""
TEXT_TEST = "assert len('''{response}''') == 0"


def scripts(secret: str, port: int) -> dict[str, str]:
    """By name, the attempts that print ESCAPED."""
    every = FILES | NETWORK | PROCESSES | RIGHTS | RESOURCES
    return {
        name: attempt(body.replace("{{", "{").replace("}}", "}").replace("{secret!r}", repr(secret)).replace("{port}", str(port)))
        for name, body in every.items()
    }


def attempt(body: str) -> str:
    """A program that says whether its body succeeded."""
    return f"try:\n{textwrap.indent(body, '    ')}\n    print('ESCAPED')\nexcept BaseException as error:\n    print(type(error).__name__, error)\n"


def names() -> list[str]:
    """All of them."""
    return [*scripts("", 0), *ENDLESS, *SLEEPING, *FORGERIES]


def try_all(chosen: Iterable[str], secret: str, port: int) -> dict[str, bool]:
    """By name, whether the attempt succeeded."""
    printing = scripts(secret, port)
    interpreter = survey(None)
    succeeded = {}
    for name in chosen:
        if name in FORGERIES:
            source, code = FORGERIES[name]
            kind = "assert" if code else "text"
            test = {"kind": kind, "code": code or TEXT_TEST, "source": source, "entry": "", "response": source}
            outcomes = list(run(Job(source if code else "", kind, (), (test,)), LIMITS, interpreter))
            succeeded[name] = outcomes[0].ending == Ending.OK
        elif name in printing:
            outcomes = list(run(Job(printing[name], "input", (b"first", b"LATERCASE")), LIMITS, interpreter))
            own = outcomes[:1] if name == "search_memory" else outcomes  # which looks for the next case's input
            succeeded[name] = any(outcome.ending == Ending.OK and NOT_REFUSED.search(outcome.output) is not None for outcome in own)
        else:
            limits = Limits(1, 4.0 if name in SLEEPING else LIMITS.wall_seconds, 256, 16, 1)
            outcomes = list(run(Job((ENDLESS | SLEEPING)[name], "input", (b"",)), limits, interpreter))
            succeeded[name] = not _ended(outcomes[0], name)
    return succeeded


def _ended(outcome: Outcome, name: str) -> bool:
    return outcome.ending != Ending.OK and (name not in SLEEPING or outcome.ending == Ending.WALL_TIME) and outcome.cpu_seconds < 3


if __name__ == "__main__":
    print(json.dumps(try_all(sys.argv[3:] or names(), sys.argv[1], int(sys.argv[2]))))
