"""`python -m roll.cluster HOSTFILE [start|stop] [--run]`: print or run the commands that start a Ray cluster on the
hosts of a hostfile.

Exit status: 0 done; 2 the hostfile cannot be used; 3 a host could not be reached, or Ray did not start there.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from roll.cluster.commands import Command, join_words, start_commands, stop_commands
from roll.cluster.hostfile import filter_hosts, parse_hostfile
from roll.errors import ConfigError, Fault, RollError

SECONDS = 120.0
"""Deadline for one host, in seconds."""


BY_HAND = "leave out --run, and run each printed command on its host"
CHOSEN = "use --include or --exclude to choose hosts and GPUs, and device_mapping to assign the GPUs to roles"
OTHER_FLAGS = {
    "--num_gpus": CHOSEN,
    "--num_nodes": CHOSEN,
    "--no_ssh": BY_HAND,
    "--node_rank": BY_HAND,
    "--launcher": BY_HAND,
    "--master_addr": "remove it: the first host of the hostfile is the head",
    "--master_port": "use --port",
    "--hostfile": "give the hostfile without a flag: python -m roll.cluster HOSTFILE",
}
"""Flags of DeepSpeed's launcher, and what to do instead."""


class HostFailed(RollError):
    """A command failed on a host."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print or run the commands. Return the exit status."""
    arguments, rest = cluster_parser().parse_known_args(argv)
    try:
        if faults := [_no_flag(word) for word in rest]:
            raise ConfigError(faults)
        hosts = filter_hosts(
            parse_hostfile(_read(arguments.hostfile), str(arguments.hostfile)), arguments.include, arguments.exclude
        )
        start = arguments.action == "start"
        commands = (
            start_commands(hosts, arguments.port, arguments.ray) if start else stop_commands(hosts, arguments.ray)
        )
        for number, command in enumerate(commands):
            print(command, flush=True)
            if arguments.run and (failure := run_on_host(command)):
                ended = _end(stop_commands(hosts[:number], arguments.ray)) if start else ""
                raise HostFailed(failure + ended)
        if start:
            print(
                f"then, on {hosts[0].name}: {join_words(hosts, arguments.port)} python -m roll.pipeline --config-name "
                f"..."
            )
    except RollError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


def cluster_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    found = argparse.ArgumentParser(
        "python -m roll.cluster", description="Start a Ray cluster on the hosts of a DeepSpeed hostfile."
    )
    found.add_argument("hostfile", type=Path, help="lines such as `worker-1 slots=8`; the first host becomes the head")
    found.add_argument("action", nargs="?", choices=("start", "stop"), default="start")
    found.add_argument(
        "--run",
        action="store_true",
        help="run the commands over ssh, without a password, instead of only printing them",
    )
    some = found.add_mutually_exclusive_group()
    some.add_argument("--include", help="use only these hosts, or these of their GPUs: worker-1@worker-2:0,1")
    some.add_argument("--exclude", help="use all hosts and GPUs except these")
    found.add_argument("--port", type=int, default=6379, help="port of the head")
    found.add_argument(
        "--ray",
        type=PurePosixPath,
        default=PurePosixPath(sys.executable).with_name("ray"),
        help="path of the program `ray` on the hosts",
    )
    return found


def _no_flag(word: str) -> Fault:
    flag = word.partition("=")[0]
    return Fault(
        flag,
        "is not a flag of this command",
        OTHER_FLAGS.get(flag.replace("-", "_").replace("__", "--", 1), "see --help"),
    )


def run_on_host(command: Command) -> str | None:
    """Run a command on its host with the deadline `SECONDS`. Return why it failed, None if it succeeded."""
    try:
        done = subprocess.run(command.over_ssh, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"{command.host}: did not finish within {SECONDS:.0f} s: {command}"
    except FileNotFoundError:
        return (
            f"{command.host}: `ssh` is not installed here; install it, or run on that host: {shlex.join(command.words)}"
        )
    if not done.returncode:
        return None
    said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    return f"{command.host}: exit status {done.returncode}: {said}; run it by hand: {command}"


def _end(commands: Sequence[Command]) -> str:
    """Stop the hosts that have started, so that no partial cluster remains. Return a text about the result, to append
    to a message.
    """
    failures = [failure for command in commands if (failure := run_on_host(command))]
    if failures:
        return "; some hosts that had started could not be stopped: " + "; ".join(failures)
    return f"; stopped again: {', '.join(command.host for command in commands)}" if commands else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [Fault("hostfile", f"'{path}' cannot be read: {error}", "give the path of a DeepSpeed hostfile")]
        ) from error


if __name__ == "__main__":
    sys.exit(main())
