"""The containers of an environment process: which engine holds them, and which are ready before they are needed."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from roll.agents.containers.bubblewrap import BubblewrapContainer
from roll.agents.containers.command_line import CommandLineContainer, pull, remove_orphans
from roll.agents.containers.container import Container, ContainerLost, ContainerSettings
from roll.agents.containers.layout import EXPORT, BadImage
from roll.agents.containers.unpacked import UnpackedImage, unpacked
from roll.config.derived.domains import PATHS
from roll.system.own_folder import own_folder

LOG = logging.getLogger(__name__)
COMMAND_LINES = ("podman", "docker")
Opened = BubblewrapContainer | CommandLineContainer


class Containers:
    """Opens containers. For use in one event loop; `prepare` may be called before it runs."""

    def __init__(self, settings: ContainerSettings) -> None:
        self._settings = settings
        self._ready: dict[str, list[asyncio.Task[Opened]]] = defaultdict(list)
        self._unpacked: dict[str, UnpackedImage] = {}
        self._closing = ExitStack()
        self._owner: Path | None = None
        self._cleaned = set[str]()

    def prepare(self, image: str | None = None) -> None:
        """Unpack or pull an image, by default that of the settings. Blocks meanwhile.

        Raises:
            BadImage: this host cannot use the image.
        """
        if name := image or self._settings.image:
            engine = self.engine_of(name)
            if engine == "bubblewrap":
                self._unpacked[name] = unpacked(Path(name).expanduser(), Path(self._settings.cache))
            else:
                pull(engine, name)

    def engine_of(self, image: str) -> str:
        """Return the engine that holds containers of an image. Raises BadImage if this host has none for it."""
        engine, is_path = self._settings.engine, Path(image).expanduser().exists()
        if engine == "auto":
            found = next((one for one in COMMAND_LINES if shutil.which(one)), None)
            if is_path or image.startswith(PATHS):
                return "bubblewrap"
            if found is None:
                problem = f"there is no file or folder '{image}', and neither podman nor docker to pull it"
                raise BadImage(problem, f"install one, or {EXPORT}", "not_found")
            return found
        if engine == "bubblewrap":
            return engine
        if shutil.which(engine) is None:
            remedy = f"install it, or remove container.engine and {EXPORT}"
            raise BadImage(f"the program {engine} is not installed", remedy, "not_installed")
        if is_path:
            remedy = f"load it (`{engine} load -i FILE`) and give its name, or remove container.engine"
            raise BadImage(f"'{image}' is a path, but {engine} takes names", remedy, "unfit")
        return engine

    async def open(self, image: str | None = None) -> Container:
        """Return a fresh container of an image, by default that of the settings. The caller closes it.

        Raises:
            BadImage: there is no image, or this host cannot use it.
            ContainerLost: the container did not start.
        """
        name = image or self._settings.image
        if name is None:
            remedy = "set environments.<domain>.image, or give the row a column 'image'"
            raise BadImage("neither the domain nor the row names an image", remedy, "missing")
        try:
            container = await self._next(name)
        finally:
            self._refill()
        return container

    async def close(self) -> None:
        """Close the containers that nobody has opened."""
        waiting = [task for tasks in self._ready.values() for task in tasks]
        self._ready.clear()
        for task in waiting:
            if not task.cancel():
                await task.result().close()
        await asyncio.gather(*waiting, return_exceptions=True)
        self._closing.close()

    async def _next(self, name: str) -> Opened:
        """Return a container that was kept ready, if it still runs, or else a new one."""
        while tasks := self._ready[name]:
            task = tasks.pop(0)
            try:
                container = await task
            except asyncio.CancelledError:
                if not task.cancelled() and task.exception() is None:  # it started at this moment
                    await task.result().close()
                raise
            if container.is_alive:
                return container
            await container.close()
        return await self._started(name)

    def _refill(self) -> None:
        """Start containers of the domain's image until enough are ready."""
        if (name := self._settings.image) is not None:
            tasks = self._ready[name]
            while len(tasks) < self._settings.warm:
                task = asyncio.create_task(self._started(name))
                task.add_done_callback(_note_failure)
                tasks.append(task)

    async def _started(self, name: str) -> Opened:
        engine, settings = self.engine_of(name), self._settings
        if engine == "bubblewrap":
            image = self._unpacked.get(name) or await asyncio.to_thread(
                unpacked, Path(name).expanduser(), Path(settings.cache)
            )
            self._unpacked[name] = image
            return await BubblewrapContainer.start(image, settings.bounds)
        if self._owner is None:
            self._owner = self._closing.enter_context(own_folder(None))
        if engine not in self._cleaned:
            self._cleaned.add(engine)
            if removed := await remove_orphans(engine):
                LOG.warning("removed %d container(s) of runs that were killed", len(removed))
        await asyncio.to_thread(pull, engine, name)
        return await CommandLineContainer.start(engine, name, settings.bounds, self._owner)


def _note_failure(task: asyncio.Task[Opened]) -> None:
    """Log why a container that was to be kept ready did not start. The episode that gets it fails with this cause."""
    if not task.cancelled() and isinstance(error := task.exception(), ContainerLost | BadImage):
        LOG.warning("%s", error)
