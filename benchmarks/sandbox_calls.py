"""The resources that `benchmarks/sandbox_resources.py` attacks, and the calls that take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FILES = 64
"""Open files of a program (roll.rewards.sandbox.program.OPEN_FILES)."""
INODES = 4096
DISK = 16 << 20
MEMORY = 512 << 20


@dataclass(frozen=True)
class Resource:
    """A resource of the kernel, and Python statements that each take a part of it."""

    name: str
    bound: int
    """The most that a program may take."""
    bodies: tuple[str, ...]
    """Bodies of a function of the counter `i` that returns the amount taken; None means 1."""
    setup: str = ""
    measure: str = ""
    """Sets `taken[0]` to what is held in the end, where a successful call does not show it."""
    most: int | None = None
    """Amount at which an attempt stops. None: far beyond the bound."""
    rises: Mapping[str, float] = field(default_factory=dict)
    """Gauges that may rise by more than usual, as the bound implies, and by how much."""


def _denied(name: str, *bodies: str, setup: str = "") -> Resource:
    return Resource(name, 0, bodies, setup)


RESOURCES = (
    Resource(
        "inodes",
        INODES,
        (
            "open(f'/tmp/a{i}', 'x').close()",
            "os.mkdir(f'/tmp/b{i}')",
            "os.mkdir('/tmp/' + f'{i:07}' * 36)",
            "open('/tmp/c', 'a').close(); os.link('/tmp/c', '/tmp/' + f'l{i:06}' * 36)",
            "os.symlink('x' * 4000, f'/tmp/s{i}')",
            "call(266, f'/tmp/t{i}'.encode(), -100, f'/tmp/u{i}'.encode())",
            "os.mkfifo(f'/tmp/f{i}')",
            "call(133, f'/tmp/n{i}'.encode(), 0o140600, 0)",
            "os.close(tempfile.mkstemp()[0])",
            "tempfile.mkdtemp()",
            "os.close(call(85, f'/tmp/d{i}'.encode(), 0o600))",
            "os.close(call(257, -100, f'/tmp/e{i}'.encode(), 0o102, 0o600))",
            "call(258, -100, f'/tmp/g{i}'.encode(), 0o700)",
            "os.makedirs(f'/tmp/h{i // 50}/' + '/'.join('d' * (i % 50 + 1)), exist_ok=False)",
            "open('/tmp/m', 'a').close(); os.setxattr('/tmp/m', f'user.{i}', b'x' * 1000)",
            "open('/tmp/q', 'a').close(); call(463, -100, b'/tmp/q', 0, f'user.{i}'.encode(), bytes(16), 16)",
        ),
    ),
    _denied(
        "aio contexts",
        "call(206, 1, bytearray(8))",
        "call(206, 128, bytearray(8))",
        "call(206, random.randrange(1, 65536), bytearray(8))",
        "call(206, 65536, bytearray(8))",
        "lib('syscall', 206, 4096, bytearray(8))",
    ),
    _denied(
        "inotify",
        "held.append(call(253))",
        "held.append(call(294, random.choice((0, 0o4000, 0o2000000))))",
        "held.append(lib('inotify_init'))",
        "fd = lib('inotify_init1', 0); lib('inotify_add_watch', fd, b'/tmp', 0xfff)",
        "fcntl.fcntl(os.open('/tmp', os.O_RDONLY), 1026, 0x8000003f)",
        "call(72, os.open('/tmp', os.O_RDONLY), 1026, 0x3f)",
    ),
    _denied(
        "message queues",
        "call(240, f'q{i}'.encode(), 0o102, 0o600, 0)",
        "call(240, f'q{i}'.encode(), 0o100, 0o666, struct.pack('8q', 0, 10, 8192, 0, 0, 0, 0, 0))",
        "libc.mq_open.restype = ctypes.c_int; lib('mq_open', f'/q{i}'.encode(), 0o102, 0o600, 0)",
        "call(68, i, 0o1600)",
        "lib('msgget', 0, 0o1600)",
        "call(68, 0, 0o3666)",
    ),
    _denied(
        "shared memory of System V",
        "call(29, 0, 1 << 20, 0o1600)",
        "call(29, i, 4096, 0o3600)",
        "lib('shmget', 0, 1 << random.randrange(12, 28), 0o1600)",
        "call(64, 0, 250, 0o1600)",
        "lib('semget', i, 1, 0o1600)",
    ),
    Resource(
        "pending signals",
        64 + 31,  # one more of each real-time signal is pending without being queued
        (
            "os.kill(os.getpid(), random.randrange(34, 65))",
            "signal.pthread_kill(threading.get_ident(), 40)",
            "call(129, os.getpid(), 34 + i % 30, struct.pack('<iii', 34 + i % 30, 0, -1) + bytes(116))",
            "call(234, os.getpid(), threading.get_native_id(), 45)",
            "call(200, threading.get_native_id(), 46)",
            "lib('sigqueue', os.getpid(), 34 + i % 30, i)",
            "call(297, os.getpid(), os.getpid(), 50, struct.pack('<iii', 50, 0, -1) + bytes(116))",
        ),
        setup="signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65))",
        measure="taken[0] = 0\nwhile signal.sigtimedwait(range(34, 65), 0) is not None: taken[0] += 1",
        most=200_000,
    ),
    _denied(
        "keys",
        "call(248, b'user', f'k{i}'.encode(), bytes(1000), 1000, -random.randrange(1, 6))",
        "call(248, b'keyring', f'r{i}'.encode(), 0, 0, -3)",
        "call(248, b'logon', f'a:{i}'.encode(), b'x', 1, -4)",
        "call(249, b'user', f'k{i}'.encode(), b'x', -3)",
        "call(250, 1, f's{i}'.encode())",
        "call(250, 0, -random.randrange(1, 6), 1)",
    ),
    _denied(
        "flushes of the machine's disks",
        "call(162)",
        "call(306, os.open('/tmp', os.O_RDONLY))",
        "lib('syncfs', os.open(os.__file__, os.O_RDONLY))",
        "runs(lambda: os.fsync(9999), 9)",
        "runs(lambda: os.fdatasync(9999), 9)",
        "runs(lambda: call(277, 9999, 0, 0, 7), 9)",
        "runs(lambda: call(26, 4096, 4096, 4), 12)",
        "runs(lambda: call(74, 9999), 9)",
        "runs(lambda: lib('fdatasync', 9999), 9)",
    ),
    _denied(
        "the machine's page cache",
        "runs(lambda: os.posix_fadvise(9999, 0, 0, os.POSIX_FADV_DONTNEED), 9)",
        "runs(lambda: call(221, 9999, 0, 0, random.randrange(6)), 9)",
        "runs(lambda: call(187, 9999, 0, 1 << 30), 9)",
        "runs(lambda: lib('readahead', 9999, 0, 1 << 30), 9)",
    ),
    _denied(
        "userfaultfd",
        "call(323, 0)",
        "call(323, random.choice((1, 0o4000, 0o2000001)))",
        "os.open('/dev/userfaultfd', os.O_RDWR)",
        "lib('syscall', 323, 1)",
    ),
    _denied(
        "perf events",
        "call(298, struct.pack('<IIQ', 1, 112, i % 10) + bytes(96), 0, -1, -1, 0)",
        "call(298, struct.pack('<IIQ', 0, 112, 0) + bytes(96), -1, 0, -1, 8)",
        "lib('syscall', 298, struct.pack('<IIQ', 2, 112, i % 5) + bytes(96), 0, -1, -1, 0)",
    ),
    _denied(
        "bpf",
        "call(321, 0, struct.pack('<IIIII', random.randrange(1, 30), 4, 4, 1024, 0) + bytes(100), 120)",
        "call(321, 5, struct.pack('<IIQQ', 1, 2, 0, 0) + bytes(96), 120)",
        "lib('syscall', 321, 0, struct.pack('<IIIII', 2, 4, 4096, 1024, 0) + bytes(100), 72)",
    ),
    _denied(
        "memory in files",
        "held.append(os.memfd_create('m'))",
        "call(319, b'm', random.randrange(4))",
        "lib('memfd_create', b'm', 4)",
        "call(447, random.choice((0, 0o2000000)))",
        "os.open('/dev/shm/x', os.O_CREAT | os.O_RDWR)",
        "lib('shm_open', b'/x', 0o102, 0o600)",
    ),
    _denied(
        "timers",
        "call(222, random.choice((0, 1, 2, 3, 7)), 0, bytearray(8))",
        "call(222, 1, struct.pack('<qii', 0, 34, 0) + bytes(48), bytearray(8))",
        "lib('timer_create', 1, 0, bytearray(8))",
        "lib('timer_create', 0, struct.pack('<qii', 0, 34, 0) + bytes(48), bytearray(8))",
    ),
    Resource(
        "watches of epoll",
        FILES * FILES * FILES,
        (
            "held.append(select.epoll()); held[-1].register(kept_pipe[0], 1)",
            "call(233, call(213, 1), 1, kept_pipe[0], struct.pack('<IQ', 1, 0))",
            "call(233, call(291, 0), 1, kept_pipe[1], struct.pack('<IQ', 4, 0))",
            "first = held[0] if held else held.append(select.epoll()) or held[0]\n"
            "held.append(os.dup(kept_pipe[0])); first.register(held[-1], 1)",
            "outer = select.epoll(); outer.register(held[-1] if held else kept_pipe[0]); held.append(outer)",
            "first = held[0] if held else held.append(select.epoll()) or held[0]\n"
            "fd = 10 + i % 40\nos.dup2(kept_pipe[i % 2], fd); first.register(fd, 1); os.close(fd)",
        ),
        setup="kept_pipe = os.pipe()",
        most=2_000_000,
    ),
    Resource(
        "bytes in pipes",
        FILES * (64 << 10),
        (
            "r, w = os.pipe(); held.append((r, w)); os.set_blocking(w, False); return os.write(w, bytes(1 << 21))",
            "pair = bytearray(8); call(22, pair); r, w = struct.unpack('ii', kept[-1].raw[:8])\n"
            "os.set_blocking(w, False); return os.write(w, bytes(1 << 21))",
            "pair = bytearray(8); call(293, pair, 0o4000); w = struct.unpack('ii', kept[-1].raw[:8])[1]\n"
            "return os.write(w, bytes(1 << 21))",
            "r, w = os.pipe(); held.append((r, w)); fcntl.fcntl(w, 1031, 1 << 20); os.set_blocking(w, False)\n"
            "return os.write(w, bytes(1 << 21))",
            "r, w = os.pipe2(os.O_NONBLOCK | 0o40000); held.append((r, w)); n = 0\n"
            "while n < 1 << 20: n += os.write(w, b'x')\nreturn n",
        ),
        most=1 << 30,
    ),
    _denied(
        "pages kept by pipes",
        "call(278, pipe[1], struct.pack('QQ', ctypes.addressof(area), 4096), 1, 0)",
        "call(278, pipe[1], struct.pack('QQ', ctypes.addressof(area), 1 << 20), 1, 8)",
        "lib('vmsplice', pipe[1], struct.pack('QQ', ctypes.addressof(area), 4096), 1, 2)",
        "call(276, pipe[0], pipe[1], 4096, 2)",
        "lib('tee', pipe[0], pipe[1], 4096, 2)",
        "os.splice(source, pipe[1], 4096, offset_src=0)",
        "call(275, source, 0, pipe[1], 0, 4096, 2)",
        "fcntl.fcntl(pipe[1], 1031, 1 << 20)",
        "call(72, pipe[1], 1031, 1 << 18)",
        setup="pipe = os.pipe2(os.O_NONBLOCK); os.write(pipe[1], b'x')\n"
        "area = ctypes.create_string_buffer(1 << 21); source = os.open(os.__file__, os.O_RDONLY)",
    ),
    _denied(
        "descriptors in flight",
        "a, b = socket.socketpair(); held.append((a, b)); socket.send_fds(a, [b'x'], [0] * 60)",
        "a, b = socket.socketpair(); held.append((a, b))\n"
        "a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack('i', b.fileno()))])",
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); held.append((a, b)); a.sendmsg([b'x'])",
        "call(46, socket.socketpair()[0].detach(), bytes(56), 0)",
        "call(307, socket.socketpair()[0].detach(), bytes(64), 1, 0)",
    ),
    Resource(
        "bytes in sockets",
        FILES * 2 * 212_992,
        (
            "pair = socket.socketpair(); held.append(pair); n = 0\nfor one in pair:\n    one.setblocking(False)\n"
            "    n += one.send(bytes(1 << 22))\nreturn n",
            "pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); held.append(pair); n = 0\n"
            "for one in pair:\n    one.setblocking(False); n += one.send(bytes(60000))\nreturn n",
            "pair = socket.socketpair(); held.append(pair)\n"
            "pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24); pair[0].setblocking(False)\n"
            "return pair[0].send(bytes(1 << 24))",
            "pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); held.append(pair)\n"
            "pair[0].setblocking(False); return pair[0].send(bytes(60000))",
        ),
        most=1 << 30,
    ),
    _denied(
        "fanotify",
        "call(300, random.choice((0, 4, 8, 0x200)), 0)",
        "lib('fanotify_init', 0x200, 0)",
        "call(301, 0, 1, 0x20, -100, b'/tmp')",
    ),
    _denied(
        "io_uring",
        "call(425, 1 << random.randrange(0, 13), bytearray(120))",
        "call(425, 4096, bytes(8) + struct.pack('<I', 2) + bytes(108))",
        "lib('syscall', 425, 8, bytearray(120))",
        "call(426, 0, 1, 0, 0, 0, 0)",
        "call(427, 0, 0, 0, 0)",
    ),
    _denied(
        "locks",
        "runs(lambda: fcntl.lockf(9999, fcntl.LOCK_EX, 1, 2 * i), 9)",
        "runs(lambda: call(72, 9999, 6, struct.pack('hhqqi', 1, 0, 2 * i, 1, 0)), 9)",
        "runs(lambda: call(72, 9999, 7, struct.pack('hhqqi', 0, 0, 2 * i, 1, 0)), 9)",
        "fcntl.fcntl(own, 37, struct.pack('hhqqi', 1, 0, 2 * i, 1, 0))",
        "fcntl.fcntl(own, 38, struct.pack('hhqqi', 0, 0, 2 * i, 1, 0))",
        "fcntl.fcntl(own, 1024, fcntl.F_RDLCK)",
        "os.lockf(own, os.F_LOCK, 1)\n"
        "if fcntl.fcntl(own, 36, struct.pack('hhqqi', 1, 0, 0, 0, 0))[:2] == b'\\2\\0': raise OSError(1, 'no lock')",
        setup="own = os.open('/tmp/locked', os.O_CREAT | os.O_RDWR)",
    ),
    _denied(
        "filters of the kernel",
        "call(444, struct.pack('<QQ', 1, 0), 16, 0)",
        "call(445, 0, 1, bytes(16), 0)",
        "call(446, 0, 0)",
        "call(317, 1, 0, allow)",
        "call(157, 22, 2, allow)",
        "lib('prctl', 22, 2, allow)",
        "call(317, 1, random.choice((2, 4, 8)), allow)",
        "a, b = socket.socketpair(); held.append(a); a.setsockopt(1, 26, allow.raw)",
        "call(54, socket.socketpair()[0].detach(), 1, 26, allow, 16)",
        setup="steps = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))\n"
        "allow = ctypes.create_string_buffer(struct.pack('@HP', 1, ctypes.addressof(steps)), 16)",
    ),
    _denied(
        "processes",
        "os.fork()",
        "os.posix_spawn('/usr/bin/true', ['true'], {})",
        "import subprocess; subprocess.Popen(['true'])",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
        "call(57)",
        "call(58)",
        "call(56, 17, 0, 0, 0, 0)",
        "call(435, struct.pack('<11Q', 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88)",
        "call(59, sys.executable.encode(), 0, 0)",
        "os.forkpty()",
        "lib('daemon', 0, 0)",
    ),
    Resource(
        "threads",
        64,
        (
            "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
            "import _thread; _thread.start_new_thread(time.sleep, (9,))",
            "threading.stack_size(32768); threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
            "from concurrent.futures import ThreadPoolExecutor\nheld.append(ThreadPoolExecutor(1))\n"
            "held[-1].submit(time.sleep, 9)",
            "threading.Timer(9, print).start()",
            "code = libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.pause, None)\n"
            "if code: raise OSError(code, 'pthread_create')",
        ),
        most=5000,
    ),
    _denied(
        "namespaces and mounts",
        "call(272, random.choice((0x10000000, 0x20000, 0x40000000, 0x8000000, 0x2000000, 0x80)))",
        "lib('unshare', 0x10000000)",
        "call(308, 0, 0)",
        "call(165, b'tmpfs', b'/tmp', b'tmpfs', 0, 0)",
        "lib('mount', b'tmpfs', b'/tmp', 0, 38, b'nr_inodes=0')",
        "call(430, b'tmpfs', 0)",
        "call(428, -100, b'/tmp', 1)",
        "call(442, -100, b'/tmp', 0, bytes(32), 32)",
        "call(467, -100, b'/tmp', 1, bytes(32), 32)",
    ),
    Resource(
        "open files",
        FILES,
        (
            "held.append(os.open('/dev/null', os.O_RDONLY))",
            "held.append(os.dup(1))",
            "held.append(call(290, 0, 0))",
            "held.append(call(283, 1, 0))",
            "held.append(call(289, -1, bytes(8), 8, 0))",
            "held.append(os.open('/tmp', os.O_TMPFILE | os.O_RDWR))",
            "fcntl.fcntl(1, fcntl.F_DUPFD, 3)",
            "held.append(call(257, -100, b'/tmp', 0x200000))",
            "held.append(call(434, os.getpid(), 0))",
            "held.append(select.epoll())",
        ),
    ),
    Resource(
        "bytes of memory",
        MEMORY + DISK,
        (
            "held.append(bytearray(b'x') * (1 << 20)); return 1 << 20",
            "held.append(mmap.mmap(-1, 1 << 20)); held[-1].write(bytes(1 << 20)); return 1 << 20",
            "m = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)\n"
            "held.append(m); m.write(bytes(1 << 20)); return 1 << 20",
            "with open('/tmp/full', 'ab', 0) as file: return file.write(bytes(1 << 16))",
            "fd = os.open(f'/tmp/z{i}', os.O_CREAT | os.O_RDWR); held.append(fd)\n"
            "os.posix_fallocate(fd, 0, 1 << 20); return 1 << 20",
            "fd = os.open('/tmp', os.O_TMPFILE | os.O_RDWR); os.truncate(fd, 1 << 20)\n"
            "m = mmap.mmap(fd, 1 << 20); held.append(m); os.close(fd); m.write(bytes(1 << 20)); return 1 << 20",
        ),
        most=4 << 30,
        rises={"shared MiB": 640},
    ),
    Resource(
        "mappings",
        65_600,
        (
            "held.append(mmap.mmap(-1, 4096, prot=1 + 2 * (i % 2)))",
            "call(9, 0, 4096, 1 + 2 * (i % 2), 0x22, -1, 0)",
            "base = call(9, 0, 12288, 3, 0x22, -1, 0); call(10, base + 4096, 4096, 1); return 3",
        ),
        most=1_000_000,
        rises={"slab MiB": 128, "files": 67_000, "inodes": 67_000},  # shared mappings: 1.4 KiB each
    ),
    _denied(
        "sockets",
        "held.append(socket.socket(random.choice((2, 10, 16, 17, 38, 40)), random.choice((1, 2, 3))))",
        "call(41, random.choice((1, 2, 10, 16, 17, 38, 40, 44)), random.choice((1, 2, 3, 5)), 0)",
        "lib('socket', 16, 3, 0)",
        "socket.create_server(('127.0.0.1', 0))",
        "lib('socket', 38, 5, 0)",
    ),
    _denied(
        "interrupts of other processes",
        "call(324, 1, 0, 0)",
        "call(324, 2, 0, 0)",
        "call(324, random.choice((4, 8, 16, 32, 64)), 0, 0)",
        "lib('syscall', 324, 2, 0, 0)",
    ),
    _denied(
        "extended attributes",
        "os.setxattr('/tmp', f'user.{i}', bytes(4000))",
        "call(188, b'/tmp', f'user.{i}'.encode(), bytes(100), 100, 0)",
        "call(189, b'/tmp', f'user.{i}'.encode(), bytes(100), 100, 0)",
        "call(190, os.open('/tmp', 0), f'user.{i}'.encode(), bytes(100), 100, 0)",
        "call(463, -100, b'/tmp', 0, f'user.{i}'.encode(), bytes(16), 16)",
    ),
)
