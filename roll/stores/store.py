"""A place in an object store or a shared folder, by fsspec."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from roll.errors import Fault, FaultCode, RollError
from roll.stores.address import normal

T = TypeVar("T")
ACCESS = (
    "check the rights, and the credentials: AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for Google, "
    "GOOGLE_APPLICATION_CREDENTIALS"
)
REACH = "check the network, and AWS_ENDPOINT_URL for a store of another provider"


MARKS = ("ETag", "etag", "md5Hash", "mtime")
"""Facts that the clients of fsspec give of a file, the most telling first."""


class StoreError(RollError):
    """A store refused a request or could not be reached. `str()` has the address, the cause and the remedy."""

    def __init__(self, address: str, problem: str, remedy: str, code: FaultCode) -> None:
        super().__init__(f"{address}: {problem}; {remedy}")
        self.address, self.problem, self.remedy = address, problem, remedy
        self.code: FaultCode = code

    def __reduce__(self) -> tuple[type[StoreError], tuple[str, str, str, FaultCode]]:
        return type(self), (self.address, self.problem, self.remedy, self.code)

    def fault(self, place: str) -> Fault:
        """Return the error as the fault of the key `place`."""
        return Fault(place, f"'{self.address}': {self.problem}", self.remedy, self.code)


class Store:
    """Files below an address. Names are relative to it, with forward slashes. Threads may share a store.

    All methods raise StoreError if the store refuses a request or cannot be reached.
    """

    def __init__(self, address: str) -> None:
        """`address`: see `roll.stores.address`; `address_fault` and `missing_package` found no fault in it."""
        self.address = normal(address)
        self._is_local = urlsplit(address).scheme == "file"
        self._root = urlsplit(self.address).path if self._is_local else self.address.partition("://")[2]

    @cached_property
    def _files(self) -> Any:
        import fsspec  # Imported here, because most runs use no store.

        return fsspec.filesystem(
            urlsplit(self.address).scheme, use_listings_cache=False, skip_instance_cache=True, **self._options
        )

    @property
    def _options(self) -> dict[str, Any]:
        """Bounds, in seconds, on what would else wait for minutes. s3fs itself repeats a request five times."""
        if urlsplit(self.address).scheme != "s3":
            return {}
        return {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 1}}}

    def below(self, name: str) -> Store:
        """Return the part of this store below `name`."""
        part = Store(f"{self.address}/{name}")
        part.__dict__["_files"] = self._files
        return part

    def sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of all files, by name. Empty if there are none."""

        return {name: size for name, (size, _) in self.marks().items()}

    def marks(self) -> dict[str, tuple[int, str]]:
        """Return the size in bytes of each file, and a text that differs once it is written again, by name."""

        def listed() -> dict[str, tuple[int, str]]:
            found = self._files.find(self._root, detail=True)
            start = len(self._root) + 1
            return {
                path[start:]: (int(facts["size"]), str(next((facts[key] for key in MARKS if facts.get(key)), "")))
                for path, facts in found.items()
                if facts["type"] == "file"
            }

        return self._asked("", listed)

    def read(self, name: str) -> bytes | None:
        """Return the contents of a file; None if there is no such file."""
        try:
            return self._asked(name, lambda: self._files.cat_file(self._path(name)))
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def write(self, name: str, contents: bytes) -> None:
        """Write a small file at once: readers see the earlier contents or the new ones."""

        def written() -> None:
            if not self._is_local:
                self._files.pipe_file(self._path(name), contents)
                return
            partial = f"{self._path(name)}.{uuid.uuid4().hex}"
            self._make_folder(name)
            self._files.pipe_file(partial, contents)
            _flush(partial)
            os.replace(partial, self._path(name))

        self._asked(name, written)

    def create(self, name: str, contents: bytes) -> bool:
        """Write a small file if there is none of this name. Return whether it was written."""

        def created() -> bool:
            if self._is_local:
                self._make_folder(name)
            try:
                self._files.pipe_file(self._path(name), contents, mode="create")
            except FileExistsError:
                return False
            return True

        return self._asked(name, created)

    def put(self, file: Path, name: str) -> None:
        """Upload a file."""

        def uploaded() -> None:
            if self._is_local:
                self._make_folder(name)
            self._files.put_file(str(file), self._path(name))
            if self._is_local:
                _flush(self._path(name))

        self._asked(name, uploaded)

    def get(self, name: str, file: Path) -> None:
        """Download a file. Its folder must exist."""
        self._asked(name, lambda: self._files.get_file(self._path(name), str(file)))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, one after the other. Those that do not exist are passed over."""
        for name in names:
            try:
                self._asked(name, partial(self._files.rm_file, self._path(name)))
            except StoreError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_folder(self, name: str) -> None:
        os.makedirs(os.path.dirname(self._path(name)), exist_ok=True)

    def _asked(self, name: str, request: Callable[[], T]) -> T:
        """Return what a request returns. Raises StoreError for any error of the store's client."""
        try:
            return request()
        except Exception as error:  # each client has errors of its own, and botocore's are no OSError
            address = f"{self.address}/{name}" if name else self.address
            raise store_error(address, error) from error


def store_error(address: str, error: Exception) -> StoreError:
    """Return an error of a store's client with its remedy."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, PermissionError) or "credentials" in text.lower():
        return StoreError(address, f"the store refuses access ({text})", ACCESS, "not_allowed")
    if isinstance(error, FileNotFoundError):
        return StoreError(address, f"there is no such file or bucket ({text})", "check the address", "not_found")
    return StoreError(address, f"the store cannot be used ({text})", REACH, "failed")


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
