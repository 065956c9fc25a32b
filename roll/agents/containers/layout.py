"""Reads images in the OCI image layout: a folder or a tar file with `index.json` and content-addressed blobs.

The formats are those of the OCI image specification 1.1 (image-layout.md, image-index.md, manifest.md, config.md).
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from roll.errors import Fault, FaultCode

INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
PLATFORM = ("linux", "amd64")
MOST_DOCUMENT = 16 << 20
"""Largest size in bytes of an index, a manifest or a configuration."""
MOST_DEPTH = 4
"""Largest number of indexes that refer to one another."""
CHUNK = 1 << 20
EXPORT = (
    "export the image as an OCI layout: `skopeo copy docker://NAME oci:FOLDER`, `podman save --format oci-archive -o "
    "FILE NAME`, or `docker save -o FILE NAME` of Docker 25 or later"
)


class BadImage(Exception):
    """An image cannot be used."""

    def __init__(self, problem: str, remedy: str, code: FaultCode) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem, self.remedy = problem, remedy
        self.code: FaultCode = code

    def fault(self, place: str) -> Fault:
        """Return the fault of the key that names the image."""
        return Fault(place, self.problem, self.remedy, self.code)


class Layer(NamedTuple):
    """A layer of an image."""

    digest: str
    """`sha256:` and 64 hexadecimal digits."""
    media_type: str
    size: int
    """Size of the blob in bytes."""


@dataclass(frozen=True)
class ImageManifest:
    """What an image consists of."""

    digest: str
    """Digest of the manifest, which identifies the image."""
    layers: tuple[Layer, ...]
    """The lowest layer first."""
    variables: Mapping[str, str]
    """Environment variables of its processes."""
    folder: str
    """Working folder of its processes."""


class Layout:
    """An open OCI image layout. A context manager."""

    def __init__(self, path: Path) -> None:
        """Open a folder or a tar file. Raises BadImage if there is none."""
        self._path, self._opened = path, ExitStack()
        self._archive: tarfile.TarFile | None = None
        self._members: dict[str, tarfile.TarInfo] = {}
        if not path.exists():
            raise BadImage(f"{path} does not exist", f"name a folder or a tar file; {EXPORT}", "not_found")
        if path.is_file():
            self._open_archive()

    def _open_archive(self) -> None:
        try:
            self._archive = self._opened.enter_context(tarfile.TarFile(self._path))
            self._members = {member.name.removeprefix("./"): member for member in self._archive if member.isreg()}
        except (tarfile.TarError, OSError, EOFError) as error:
            self._opened.close()
            raise BadImage(f"{self._path} is not an uncompressed tar file: {error}", EXPORT, "unreadable") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def manifest(self) -> ImageManifest:
        """Return the manifest of the only image for this platform.

        Raises:
            BadImage: the layout has none or several, or a document is malformed or does not have its digest.
        """
        index = self._document("index.json", self._read("index.json", MOST_DOCUMENT))
        chosen = self._chosen(index, MOST_DEPTH)
        digest = chosen["digest"]
        try:
            found = self._blob(digest)
            config = self._blob(found["config"]["digest"])
            layers = tuple(Layer(one["digest"], one["mediaType"], one["size"]) for one in found["layers"])
            ran = config.get("config") or {}
            variables = dict(one.split("=", 1) for one in ran.get("Env") or () if "=" in one)
            return ImageManifest(digest, layers, variables, ran.get("WorkingDir") or "/")
        except (KeyError, TypeError, AttributeError) as error:
            raise self._malformed(f"the manifest {digest} lacks {error}") from error

    def open_blob(self, digest: str) -> IO[bytes]:
        """Open a blob after its content was compared with its digest. Raises BadImage if they differ."""
        name, expected = self._place(digest)
        with self._open(name) as file:
            hashed = hashlib.sha256()
            while chunk := file.read(CHUNK):
                hashed.update(chunk)
        if hashed.hexdigest() != expected:
            problem = f"{self._path}: the content of {name} has the SHA-256 {hashed.hexdigest()}"
            raise BadImage(problem, "copy the image again; the file was changed or cut off", "malformed")
        return self._open(name)

    def _chosen(self, index: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
        """Return the descriptor of the only manifest of an index that fits this platform."""
        usable = [one for one in self._listed(index) if self._fits(one)]
        if len(usable) != 1:
            names = [str((one.get("annotations") or {}).get("org.opencontainers.image.ref.name", "")) for one in usable]
            problem = f"{self._path} has {len(usable)} images for {'/'.join(PLATFORM)}"
            if usable:
                raise BadImage(f"{problem}: {', '.join(filter(None, names))}", "export one image alone", "not_allowed")
            raise BadImage(problem, f"export the image for that platform; {EXPORT}", "unfit")
        if usable[0].get("mediaType") not in INDEXES:
            return usable[0]
        if not depth:
            raise self._malformed("its indexes refer to one another too deeply")
        return self._chosen(self._blob(usable[0]["digest"]), depth - 1)

    def _listed(self, index: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        found = index.get("manifests")
        if not isinstance(found, list) or not all(isinstance(one, dict) and "digest" in one for one in found):
            raise self._malformed("index.json has no list 'manifests'")
        return found

    @staticmethod
    def _fits(descriptor: Mapping[str, Any]) -> bool:
        """Whether a descriptor is of an image, and of this platform or without a platform."""
        platform = descriptor.get("platform") or {}
        fits = not platform or (platform.get("os"), platform.get("architecture")) == PLATFORM
        return fits and descriptor.get("mediaType") in (*MANIFESTS, *INDEXES)

    def _blob(self, digest: str) -> dict[str, Any]:
        with self.open_blob(digest) as file:
            return self._document(digest, file.read(MOST_DOCUMENT))

    def _place(self, digest: str) -> tuple[str, str]:
        kind, _, value = digest.partition(":")
        if kind != "sha256" or len(value) != hashlib.sha256().digest_size * 2 or set(value) - set("0123456789abcdef"):
            raise self._malformed(f"'{digest:.100}' is not a SHA-256 digest")
        return f"blobs/sha256/{value}", value

    def _document(self, name: str, text: bytes) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError as error:
            raise self._malformed(f"{name} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise self._malformed(f"{name} is not a mapping")
        return found

    def _read(self, name: str, most: int) -> bytes:
        with self._open(name) as file:
            return file.read(most)

    def _open(self, name: str) -> IO[bytes]:
        try:
            if self._archive is None:
                return (self._path / name).open("rb")
            file = self._archive.extractfile(self._members[name])
            assert file is not None, name
            return file
        except (OSError, KeyError) as error:
            raise BadImage(f"{self._path} has no readable {name}", EXPORT, "unreadable") from error

    def _malformed(self, problem: str) -> BadImage:
        return BadImage(f"{self._path}: {problem}", EXPORT, "malformed")
