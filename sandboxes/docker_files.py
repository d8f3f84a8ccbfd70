"""Files in and out of a container, by archive: the blocking half of `DockerSandbox.put`, `get` and their archives."""

from __future__ import annotations

import errno
import io
import os
import posixpath
import stat
import tarfile
import time
from typing import Any

FILE_MAX = 256 * 2**20
ARCHIVE_MAX = 2 * 2**30
LINKS_MAX = 16


def os_error(code: int, path: str) -> OSError:
    """Return the `OSError` (of the matching subclass) that `open` would raise for `path`."""
    return OSError(code, os.strerror(code), path)


def one_file(name: str, data: bytes, mode: int, user: tuple[int, int]) -> bytes:
    """Return a tar archive that holds one regular file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.mtime = len(data), mode, int(time.time())
        entry.uid, entry.gid = user
        archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def put_archive(client: Any, container: str, folder: str, tar: bytes) -> None:
    """Unpack `tar` into `folder`; raises FileNotFoundError, NotADirectoryError or IsADirectoryError, else the SDK's."""
    import docker

    try:
        client.api.put_archive(container, folder, tar)
    except docker.errors.NotFound as error:
        if "No such container" in str(error):
            raise
        raise os_error(errno.ENOENT, folder) from error
    except docker.errors.APIError as error:
        text = str(error)
        if "not a directory" in text:
            raise os_error(errno.ENOTDIR, folder) from error
        if "cannot overwrite" in text or "is a directory" in text or "file exists" in text:
            raise os_error(errno.EISDIR, folder) from error
        raise


def get_archive(client: Any, container: str, path: str, max_bytes: int = ARCHIVE_MAX) -> tuple[bytes, dict[str, Any]]:
    """Return (tar archive of `path`, what the engine says of it: name, size, mode, linkTarget).

    Raises FileNotFoundError, or OSError (EFBIG) beyond `max_bytes`.
    """
    import docker

    try:
        chunks, about = client.api.get_archive(container, path, chunk_size=2**20)
    except docker.errors.NotFound as error:
        if "No such container" in str(error):
            raise
        raise os_error(errno.ENOENT, path) from error
    except docker.errors.APIError as error:
        if "not a directory" in str(error):
            raise os_error(errno.ENOTDIR, path) from error
        raise
    buffer = bytearray()
    try:
        for chunk in chunks:
            buffer += chunk
            if len(buffer) > max_bytes:
                raise os_error(errno.EFBIG, path)
    finally:
        chunks.close()
    return bytes(buffer), about


def get_file(client: Any, container: str, path: str) -> bytes:
    """Return the bytes of a regular file of at most 256 MiB, through symbolic links; raises OSError as `open` would."""
    for _ in range(LINKS_MAX):
        tar, about = get_archive(client, container, path, FILE_MAX + 2**20)
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            entry = archive.next()
            if entry is None:
                raise os_error(errno.ENOENT, path)
            if entry.issym():
                path = about.get("linkTarget") or posixpath.join(posixpath.dirname(path), entry.linkname)
                continue
            if entry.isdir():
                raise os_error(errno.EISDIR, path)
            content = archive.extractfile(entry) if entry.isreg() else None
            if content is None:
                raise os_error(errno.EINVAL, path)
            return content.read()
    raise os_error(errno.ELOOP, path)


def mode_bits(mode: int) -> int:
    """The permission bits of `mode`."""
    return stat.S_IMODE(mode)
