"""Files in and out of a container, by archive: the blocking half of `DockerSandbox.put`, `get` and their archives."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import tarfile
import time
from typing import Any

from sandboxes.base import FILE_MAX_BYTES

ARCHIVE_MAX = 2 * 2**30
LINKS_MAX = 16
# Bits of Go's FileMode, in which the engine tells what a path is.
GO_FOLDER = 1 << 31
GO_LINK = 1 << 27
GO_SPECIAL = 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19


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


def put_file(client: Any, container: str, path: str, tar: bytes) -> None:
    """Unpack an archive of one file, that shall become `path`; raises as `put_archive`."""
    # The engine would replace a folder, with all in it, by the file.
    with contextlib.suppress(FileNotFoundError):
        chunks, about = _open(client, container, path)
        chunks.close()
        if about["mode"] & GO_FOLDER:
            raise os_error(errno.EISDIR, path)
    put_archive(client, container, os.path.dirname(path), tar)


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


def _open(client: Any, container: str, path: str) -> tuple[Any, dict[str, Any]]:
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
        if "too many links" in str(error):
            raise os_error(errno.ELOOP, path) from error
        raise
    return chunks, about


def _read(chunks: Any, path: str, max_bytes: int) -> bytes:
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        if len(buffer) > max_bytes:
            raise os_error(errno.EFBIG, path)
    return bytes(buffer)


def get_archive(client: Any, container: str, path: str) -> bytes:
    """Return a tar archive of `path`; raises FileNotFoundError, or OSError (EFBIG) beyond 2 GiB."""
    chunks, _ = _open(client, container, path)
    with contextlib.closing(chunks):
        return _read(chunks, path, ARCHIVE_MAX)


def get_file(client: Any, container: str, path: str) -> bytes:
    """Return the bytes of a regular file of at most 256 MiB, through symbolic links; raises OSError as `open` would."""
    asked = path
    for _ in range(LINKS_MAX):
        chunks, about = _open(client, container, path)
        with contextlib.closing(chunks):
            if about["mode"] & GO_LINK:
                path = about["linkTarget"]
                continue
            if about["mode"] & GO_FOLDER:
                raise os_error(errno.EISDIR, asked)
            if about["mode"] & GO_SPECIAL:
                raise os_error(errno.EINVAL, asked)
            if about["size"] > FILE_MAX_BYTES:
                raise os_error(errno.EFBIG, asked)
            tar = _read(chunks, asked, FILE_MAX_BYTES + 2**20)
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            entry = archive.next()
            content = archive.extractfile(entry) if entry is not None else None
            if content is None:
                raise os_error(errno.EINVAL, asked)
            return content.read()
    raise os_error(errno.ELOOP, asked)
