"""Runs a coroutine to completion, even if the calling thread is inside an event loop, as in a notebook.

Cancels work when a concurrent check fails. Finishes work whose caller is cancelled.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic, TypeVar


@asynccontextmanager
async def guarded(watch: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """A context in which `watch` runs concurrently. Its error cancels the block and is raised."""
    failure = None
    try:
        async with asyncio.TaskGroup() as both:
            watching = both.create_task(watch)
            yield
            watching.cancel()
    except BaseExceptionGroup as failures:
        failure = failures.exceptions[0]
    if failure is not None:  # raised here, so that its traceback does not show the task group's error
        raise failure


T = TypeVar("T")
LOOK_SECONDS = 0.1
"""Seconds between wake-ups of a waiting thread for signals: one just before a wait does not interrupt it."""


def run_in_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `asyncio.run(work())` and return its result. Inside a running loop, run it in another thread and wait for it.

    Raises:
        KeyboardInterrupt: a signal handler raised it while the caller waited. The work was cancelled and has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    return _Elsewhere(work).result()


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Wait until the work has ended and return its result. A cancellation meanwhile is raised by the next `await`.

    For a start or an end that leaves something behind when it is cancelled. asyncio kills the process that it is
    starting, but nothing that this process has started, and may then wait forever.
    """
    caller, working, cancelled = asyncio.current_task(), asyncio.ensure_future(work), False
    assert caller is not None, "a coroutine runs in a task"
    try:
        while not working.done():
            try:
                await asyncio.wait({working})
            except asyncio.CancelledError:
                cancelled = True
        return working.result()
    finally:
        if cancelled:
            caller.uncancel()  # a surrounding `asyncio.timeout` counts
            caller.cancel()


async def in_own_thread(work: Callable[[], T]) -> T:
    """Return the result of a function that may block for minutes, or raise its exception.

    Neither a cancelled caller nor the end of the loop waits for it, as they would with `asyncio.to_thread`.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def tell(result: list[T], error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result(result[0]) if error is None else outcome.set_exception(error)

    def run() -> None:
        result, error = list[T](), None
        try:
            result.append(work())
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await outcome


class _Elsewhere(Generic[T]):
    """Runs the work in its own thread. The caller waits; in the main thread, signal handlers run there."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._outcome: list[T] = []
        self._error: BaseException | None = None
        self._task: asyncio.Task[T] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._refused = False
        self._allowed, self._begun, self._ended = threading.Event(), threading.Event(), threading.Event()

    def result(self) -> T:
        """Run the work, and return its result or raise its exception."""
        thread = threading.Thread(target=self._run, name="roll")
        try:
            thread.start()  # a signal handler may raise here, too, so the work only begins after this has returned
            self._allowed.set()
            _wait(self._ended)  # not join: if a signal handler raises in it, Python regards the thread as ended
        except BaseException:
            self._cancel()
            raise
        thread.join()
        if self._error is not None:
            raise self._error
        return self._outcome[0]

    def _run(self) -> None:
        self._allowed.wait()
        try:
            if not self._refused:
                self._outcome.append(asyncio.run(self._entered()))
        except BaseException as error:
            self._error = error
        finally:
            self._begun.set()
            self._ended.set()

    async def _entered(self) -> T:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.create_task(self._work())
        self._begun.set()
        return await self._task

    def _cancel(self) -> None:
        """Cancel the work and wait for its end. If it has not begun, prevent it from beginning."""
        if not self._allowed.is_set():
            self._refused = True
            self._allowed.set()
            return
        self._allowed.set()  # again, because the handler may have raised inside `set`, before it woke the waiter
        _wait(self._begun)
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the loop is closed, because the work has already ended
                self._loop.call_soon_threadsafe(self._task.cancel)
        _wait(self._ended)


def _wait(event: threading.Event) -> None:
    """Wait for an event in short intervals, so that signal handlers can run."""
    while not event.wait(LOOK_SECONDS):
        pass
