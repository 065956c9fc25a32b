"""Checks the block of servers against the run's other keys, and asks the servers, before anything starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from urllib.parse import urlsplit

import httpx

from roll.config.derived.batch import longest_sequence
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RoleConfig
from roll.engines.vllm_server.facts import CLOSED, CLOSED_MISFIT, GENERATE, HEALTH, INFO, Wanted, misfits, seed_of
from roll.engines.vllm_server.settings import VllmServerConfig
from roll.errors import Fault, RollError
from roll.stores.address import is_address
from roll.system.addresses import interface_of, own_interfaces

ASK_SECONDS = 10.0
"""Deadline of a question to a server before the start, in seconds."""
EXAMPLE = "http://127.0.0.1:8001"


def server_faults(block: VllmServerConfig, name: str, role: RoleConfig, config: Config) -> Iterator[Fault]:
    """Yield faults of the keys. Asks no server."""
    where = f"{name}.strategy_args"
    if name != "actor_infer" or not isinstance(config, RlvrConfig):
        problem = f"vllm_server, but {name} gets no weights by sync, which a server outside the run needs"
        yield Fault(f"{where}.strategy_name", problem, "use vllm", "not_supported")
        return
    place = f"{where}.strategy_config.base_urls"
    if not block.base_urls:
        yield Fault(place, "[] names no server", f"give the address of each, for example [{EXAMPLE}]", "empty")
    for first, second in pairwise(sorted(block.base_urls)):
        if first == second:
            yield Fault(place, f"{first} is listed more than once", "name each server once", "duplicate")
    for url in block.base_urls:
        yield from _address(place, url)
    if is_address(name_of_model := role.model_args.model_name_or_path or config.pretrain):
        problem = f"vllm_server, but {name_of_model} is in a store, and a server is asked for the folder of its model"
        yield Fault(f"{where}.strategy_name", problem, "download the model, and name the folder", "not_supported")


def _address(place: str, url: str) -> Iterator[Fault]:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and bool(parts.port or not parts.netloc)
    except ValueError:
        parts, usable = urlsplit(""), False
    if not usable or parts.path.strip("/") or parts.query or parts.username or parts.password:
        yield Fault(
            place, f"'{url}' is not the address of a server", f"give scheme, host and port: {EXAMPLE}", "malformed"
        )
    elif not _is_here(parts.hostname or ""):
        problem = f"{url} is not on this host, and weights are sent as files in the host's shared memory"
        yield Fault(place, problem, "start the servers and the run on one host", "not_supported")


def _is_here(host: str) -> bool:
    """Return whether a host name or address is one of this host. A name that is not known may be one elsewhere."""
    try:
        found = {str(one[4][0]).partition("%")[0] for one in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    interfaces = own_interfaces()
    return all(interface_of(address, interfaces) for address in found)


def wanted_of(block: VllmServerConfig, role: RoleConfig, config: RlvrConfig) -> Wanted:
    """Return what the run needs of each server."""
    model = role.model_args.model_name_or_path or config.pretrain
    return Wanted(model, role.model_args.dtype, longest_sequence(config), block.max_num_seqs)


def unready_servers(block: VllmServerConfig, name: str, role: RoleConfig, config: Config) -> Iterator[Fault]:
    """Ask every server, and yield faults of those that answer but do not fit, or one if none answers."""
    if not isinstance(config, RlvrConfig) or any(server_faults(block, name, role, config)):
        return
    place = f"{name}.strategy_args.strategy_config.base_urls"
    found, absent, seeds = list[Fault](), dict[str, str](), dict[str, int | None]()
    with httpx.Client(timeout=ASK_SECONDS, trust_env=False) as client:
        for url in block.base_urls:
            try:
                pairs, seeds[url] = _asked(client, url, block, role, config)
                found += [Fault(place, *pair, "unfit") for pair in pairs]
            except httpx.HTTPError as error:
                absent[url] = f"{url} ({type(error).__name__}: {error})"
    if len(absent) == len(block.base_urls):
        problem = f"no server answers: {', '.join(absent.values())}"
        yield Fault(place, problem, "start one (docs/running.md, Engines outside the run)", "failed")
    yield from found
    if not config.actor_infer.generating_args.seeded:
        yield from _same_noise(place, seeds)


def _same_noise(place: str, seeds: Mapping[str, int | None]) -> Iterator[Fault]:
    """Yield a fault for each server that has the seed of one before it. `seeds` are those of the servers by address."""
    first = dict[int, str]()
    for url, seed in seeds.items():
        if seed is not None and first.setdefault(seed, url) != url:
            same = f"{first[seed]} and {url} have the same --seed, {seed}"
            problem = f"{same}: they draw their tokens with the same random numbers"
            remedy = "start each with another --seed, or set actor_infer.generating_args.seeded=true"
            yield Fault(place, problem, remedy, "duplicate")


def _asked(
    client: httpx.Client, url: str, block: VllmServerConfig, role: RoleConfig, config: RlvrConfig
) -> tuple[Sequence[tuple[str, str]], int | None]:
    """Return the problems of one server, with their remedies, and its seed if it tells its settings.

    Raises httpx.HTTPError if it does not answer.
    """
    root = url.rstrip("/")
    if (health := client.get(root + HEALTH)).status_code != 200:
        return [(f"{url}: {HEALTH} has status {health.status_code}: its engine died", "start the server again")], None
    answer = client.get(root + INFO)
    if answer.status_code in (401, 403):
        return [(f"{url} asks for an API key, which roll does not send", "start it without --api-key")], None
    if answer.status_code == 404:
        missing = f"{url} has no {INFO.partition('?')[0]}"
        return [(missing, "start it with VLLM_SERVER_DEV_MODE=1 in its environment")], None
    try:
        info = answer.json()
        pairs = misfits(info, wanted_of(block, role, config))
    except (RollError, ValueError) as error:
        return [(f"{url}: {error}", "start it with vLLM 0.32")], None
    if client.post(root + GENERATE, json={}).status_code == CLOSED:  # otherwise it refuses the empty request
        pairs.append(CLOSED_MISFIT)
    return [(f"{url}: {problem}", remedy) for problem, remedy in pairs], seed_of(info)
