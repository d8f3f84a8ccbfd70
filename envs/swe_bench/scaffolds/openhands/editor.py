"""OpenHands' file editor on the files of a container.

The editor knows local paths only. So for each call the one file that it concerns is fetched into a staging folder of
this machine, edited there by OpenHands' own code, and put back; in what the editor says, the staged path is replaced by
the container's. Why that is safe, whatever the agent has put into its container:

- What is staged is a regular file with bytes that the container gave for that path; links are followed inside the
  container, by its engine. No archive of the agent's is unpacked here and no name of the agent's is used as a path.
- The editor is handed a path that was made here. The agent's own words never reach the file system of this machine: not
  a relative path, not `~`, not `..`.

A folder's listing is made from names that the container gave. Imports `openhands`: reach this module through
`library.load`.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import secrets
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from openhands.sdk import TextContent
from openhands.sdk.utils.path import is_host_absolute_path
from openhands.sdk.utils.truncate import maybe_truncate
from openhands.tools.file_editor.definition import FileEditorAction, FileEditorObservation
from openhands.tools.file_editor.editor import IMAGE_EXTENSIONS, FileEditor
from openhands.tools.file_editor.impl import FileEditorExecutor
from openhands.tools.file_editor.utils.constants import DIRECTORY_CONTENT_TRUNCATED_NOTICE, MAX_RESPONSE_LEN_CHAR

from sandboxes.base import ContainerSandbox, Limits

LOOK_S = 60.0
LISTING_BYTES = 8 * 2**20
SPARSE_MAX = 2**40
NAME_MAX = 200

# $1 path, $2 "list" to list a folder. First line: kind parent writable readable size mode. Then, each ended by NUL:
# D folder or F anything else, of the first level; d and f of the second.
LOOK = r"""
p=$1
kind=none
if [ -d "$p" ]; then kind=folder; elif [ -f "$p" ]; then kind=file; elif [ -e "$p" ]; then kind=other; fi
above=$(dirname -- "$p"; echo x); above=${above%?x}
if [ -d "$above" ]; then parent=folder; elif [ -e "$above" ]; then parent=other; else parent=none; fi
writable=no; if [ -w "$above" ]; then writable=yes; fi
readable=no; if [ -r "$p" ]; then readable=yes; fi
about=; if [ $kind = file ]; then about=$(stat -L -c '%s %a' -- "$p" 2>/dev/null); fi
printf '%s %s %s %s %s\n' $kind $parent $writable $readable "${about:-0 644}"
if [ $kind != folder ] || [ "$2" != list ]; then exit 0; fi
cd -- "$p" || exit 0
for e in * .*; do
  case $e in .|..) continue;; esac
  if [ ! -e "$e" ] && [ ! -L "$e" ]; then continue; fi
  if [ ! -d "$e" ]; then printf 'F%s\0' "$e"; continue; fi
  printf 'D%s\0' "$e"
  case $e in .*) continue;; esac
  for c in "$e"/*; do
    if [ -d "$c" ]; then printf 'd%s\0' "$c"; elif [ -e "$c" ] || [ -L "$c" ]; then printf 'f%s\0' "$c"; fi
  done
done
"""


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What the container has at a path. `kind`: folder | file | other | none; `size` in bytes; `mode`: permissions."""

    kind: str = "none"
    parent: str = "none"
    writable: bool = False
    readable: bool = False
    size: int = 0
    mode: int = 0o644
    entries: tuple[str, ...] = ()


class ContainerEditor:
    """OpenHands' editor for the files of `sandbox`; `folder` (of this machine, of this editor alone) is its staging.

    `executor` is the one that OpenHands' tool was made with; its undo history is kept by the container's paths.
    `in_thread` runs a blocking function on a thread. One call at a time.
    """

    def __init__(
        self,
        sandbox: ContainerSandbox,
        workdir: str,
        folder: Path,
        executor: FileEditorExecutor,
        in_thread: Callable[[Callable[[], FileEditorObservation]], Awaitable[FileEditorObservation]],
    ) -> None:
        self._sandbox = sandbox
        self._workdir = workdir
        self._folder = folder
        self._executor = executor
        self._in_thread = in_thread
        self._history = executor.editor._history_manager.cache.directory
        # Names in it cannot be guessed, so no text of the agent's can hold one by chance or by design.
        self._root = folder / secrets.token_hex(16)
        self._root.mkdir(parents=True)
        executor.editor._cwd = str(self._root)

    def close(self) -> None:
        """Remove the staging folder and the undo history. Any number of times."""
        shutil.rmtree(self._root, ignore_errors=True)
        shutil.rmtree(self._history, ignore_errors=True)

    async def run(self, action: FileEditorAction) -> FileEditorObservation:
        """Carry out `action`; raises `SandboxFault` if the container fails, `TimeoutError` if it does not answer."""
        if not is_host_absolute_path(action.path):
            return await self._relative(action)
        # What OpenHands takes for absolute and is not (`~/a`, or a blank before the slash) it would look for in its
        # working folder.
        shown = PurePosixPath(action.path)
        path = posixpath.join(self._workdir, str(shown))
        facts = await self._look(path, listing=action.command == "view")
        if facts.kind == "folder" and action.command == "view" and not action.view_range:
            return self._listing(str(shown), facts)
        if refusal := _refusal(action, shown, facts):
            return FileEditorObservation.from_text(text=refusal, command=action.command, is_error=True)
        try:
            return await self._file(action, shown, path, facts)
        except OSError as error:  # the container's answer: the file was changed in the meantime
            text = f"Ran into {error} while trying to reach {shown}"
            return FileEditorObservation.from_text(text=text, command=action.command, is_error=True)

    async def _file(
        self, action: FileEditorAction, shown: PurePosixPath, path: str, facts: PathFacts
    ) -> FileEditorObservation:
        staged = self._staged(shown)
        try:
            data, sparse = b"", 0
            is_shown_image = action.command == "view" and shown.suffix.lower() in IMAGE_EXTENSIONS
            if facts.kind == "file" and not is_shown_image:  # of a picture the text says only its name
                if facts.size > FileEditor.MAX_FILE_SIZE_MB * 2**20:
                    sparse = min(facts.size, SPARSE_MAX)  # refused by its size alone
                else:
                    data = await self._sandbox.get(path)
            observation = await self._in_thread(lambda: self._edit(action, staged, data, sparse, facts))
            if action.command != "view" and not observation.is_error:
                mode = facts.mode if facts.kind == "file" else staged.stat().st_mode & 0o777
                await self._sandbox.put(path, staged.read_bytes(), mode=mode)
        finally:
            _remove(staged.parent)
        # The parent too: it is in the errors of creating a file where there is no folder.
        return _translated(observation, {str(staged): str(shown), str(staged.parent): str(shown.parent)})

    def _edit(
        self, action: FileEditorAction, staged: Path, data: bytes, sparse: int, facts: PathFacts
    ) -> FileEditorObservation:
        if facts.parent == "folder" or facts.kind != "none":
            staged.parent.mkdir()
        elif facts.parent == "other":
            staged.parent.touch()
        if facts.kind == "folder":
            staged.mkdir()
        elif facts.kind == "file":
            staged.write_bytes(data)
            if sparse:
                os.truncate(staged, sparse)
        observation: FileEditorObservation = self._executor(action.model_copy(update={"path": str(staged)}))
        return observation

    def _staged(self, shown: PurePosixPath) -> Path:
        """Where a path is staged: the same place each time, because the undo history goes by it."""
        digest = hashlib.sha256(str(shown).encode("utf-8", "surrogatepass")).hexdigest()[:24]
        plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in shown.name)
        name = plain if plain == shown.name and 0 < len(plain) <= NAME_MAX and plain not in (".", "..") else "file"
        return self._root / digest / (name if name != "file" else f"file{_plain_suffix(plain)}")

    async def _relative(self, action: FileEditorAction) -> FileEditorObservation:
        """OpenHands refuses a relative path, and suggests an absolute one if that exists."""
        shown = PurePosixPath(action.path)
        meant = PurePosixPath(self._workdir) / shown
        facts = await self._look(str(meant), listing=False)
        token = secrets.token_hex(16)
        stand_in = self._root / token

        def refuse() -> FileEditorObservation:
            if facts.kind != "none":
                stand_in.touch()
            observation: FileEditorObservation = self._executor(action.model_copy(update={"path": token}))
            return observation

        try:
            observation = await self._in_thread(refuse)
        finally:
            stand_in.unlink(missing_ok=True)
        return _translated(observation, {str(stand_in): str(meant), token: str(shown)})

    async def _look(self, path: str, *, listing: bool) -> PathFacts:
        try:
            path.encode()
            result = await self._sandbox.run(
                ["sh", "-c", LOOK, "sh", path, "list" if listing else ""],
                limits=Limits(wall_clock_s=LOOK_S, output_bytes=LISTING_BYTES),
                cwd="/",
                background=True,  # the shell of the terminal goes on
            )
            if result.timed_out:
                raise TimeoutError
            first, _, rest = result.stdout.partition("\n")
            kind, parent, writable, readable, size, mode = first.split(" ")
            entries = tuple(entry for entry in rest.split("\0") if entry)
            return PathFacts(
                kind, parent, writable == "yes", readable == "yes", int(size), int(mode, 8) & 0o7777, entries
            )
        except ValueError:  # no path at all (a NUL byte, half a character), or the agent has broken its tools
            return PathFacts()

    def _listing(self, shown: str, facts: PathFacts) -> FileEditorObservation:
        """A folder as OpenHands lists it. Not by its own code on staged names: it cuts what is too long, paths
        included, so the container's have to be there before."""
        top = sorted((entry for entry in facts.entries if entry[0] in "DF"), key=lambda entry: entry[1:])
        below: dict[str, list[str]] = {}
        for entry in facts.entries:
            if entry[0] in "df":
                below.setdefault(entry[1:].partition("/")[0], []).append(entry)
        lines = [f"{shown}/"]
        for entry in top:
            if entry[1] == ".":
                continue
            for each in [entry, *sorted(below.get(entry[1:], ()), key=lambda entry: entry[1:])]:
                lines.append(f"{shown}/{each[1:]}" + ("/" if each[0] in "Dd" else ""))
        text = (
            f"Here's the files and directories up to 2 levels deep in {shown}, excluding hidden items:\n"
            + "\n".join(lines)
        )
        hidden = sum(entry[1] == "." for entry in top)
        if hidden:
            text += (
                f"\n\n{hidden} hidden files/directories in this directory are excluded. "
                f"You can use 'ls -la {shown}' to see them."
            )
        text = maybe_truncate(
            text, truncate_after=MAX_RESPONSE_LEN_CHAR, truncate_notice=DIRECTORY_CONTENT_TRUNCATED_NOTICE
        )
        observation: FileEditorObservation = FileEditorObservation.from_text(text=text, command="view", path=shown)
        return observation


def _refusal(action: FileEditorAction, shown: PurePosixPath, facts: PathFacts) -> str:
    """What cannot be tried on a staged copy, in the words of the errors that OpenHands passes on; "" if nothing."""
    if facts.kind == "other":
        return f"The path {shown} is neither a regular file nor a directory; this tool cannot open it."
    if facts.kind == "file" and not facts.readable:
        return f"Ran into [Errno 13] Permission denied: '{shown}' while trying to read {shown}"
    if action.command != "view" and facts.kind != "folder" and facts.parent == "folder" and not facts.writable:
        return f"Ran into [Errno 13] Permission denied: '{shown.parent}' while trying to write to {shown}"
    return ""


def _remove(path: Path) -> None:
    if path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _plain_suffix(name: str) -> str:
    suffix = PurePosixPath(name).suffix
    return suffix if len(suffix) <= NAME_MAX // 4 else ""


def _translated(observation: FileEditorObservation, names: dict[str, str]) -> FileEditorObservation:
    """Replace staged paths by the container's in what the model reads."""
    parts = []
    for part in observation.content:
        if isinstance(part, TextContent):
            text = part.text
            for staged, shown in names.items():
                text = text.replace(staged, shown)
            part = part.model_copy(update={"text": text})
        parts.append(part)
    return observation.model_copy(update={"content": parts})
