"""An agent on another host than the driver reaches the gateway at the address that the run gives to it."""

from __future__ import annotations

import subprocess

from tests.hosts.lab import Lab

SERVE = """
import asyncio, sys
from roll.agents.gateway.server import Gateway, GatewayBounds

class Session:
    async def close(self): ...

async def main():
    listening = Gateway(GatewayBounds(1 << 20, 1)).listening(sys.argv[1], 0)
    async with listening as gateway, gateway.serving(Session()) as key:
        print(gateway.base_url, key, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""
ASK = """
import sys, urllib.request
asked = urllib.request.Request(sys.argv[1] + "/models", headers={"Authorization": "Bearer " + sys.argv[2]})
try:
    print(urllib.request.urlopen(asked, timeout=30).status)
except OSError as error:
    print(error)
"""


def test_agents_on_other_hosts_reach_the_gateway(two_hosts: Lab) -> None:
    first, second = two_hosts.hosts
    with first.start("python", "-c", SERVE, first.address, stdin=subprocess.PIPE) as gateway:
        assert gateway.stdout is not None and gateway.stdin is not None
        url, key = gateway.stdout.readline().split()
        assert url.startswith(f"http://{first.address}:")
        assert second.run("python", "-S", "-c", ASK, url, key) == "200\n"
        assert "401" in second.run("python", "-S", "-c", ASK, url, "roll-another")
        gateway.stdin.close()
        gateway.wait()


def test_the_default_gateway_serves_the_drivers_host_only(two_hosts: Lab) -> None:
    first, second = two_hosts.hosts
    with first.start("python", "-c", SERVE, "127.0.0.1", stdin=subprocess.PIPE) as gateway:
        assert gateway.stdout is not None and gateway.stdin is not None
        url, key = gateway.stdout.readline().split()
        there = url.replace("127.0.0.1", first.address)
        assert "refused" in second.run("python", "-S", "-c", ASK, there, key)
        assert first.run("python", "-S", "-c", ASK, url, key) == "200\n"
        gateway.stdin.close()
        gateway.wait()
