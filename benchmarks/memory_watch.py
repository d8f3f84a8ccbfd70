"""Memory of other processes by what they do: sampled from /proc, and ended before the machine has none left."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_EVERY_S = 0.02
_FILES_EVERY_S = 1.0  # reading them walks through all pages


@dataclass
class Watch:
    """Samples `processes` in a thread while the block runs; each writes what it does into `folder/phase_N`.

        with Watch([pid, pid], folder, least_bytes=2**30) as watch: ...
        watch.peaks[0]["policy update"]  # bytes of the first process

    A process's memory is what is its own (RssAnon and RssShmem) and its share of the pages of files (Pss_File: of a
    library or a mapped snapshot that two processes read, each has half). All are killed, and `ended` says so, once the
    machine has less than `least_bytes` available.
    """

    processes: Sequence[int]
    folder: Path
    least_bytes: int
    peaks: list[dict[str, int]] = field(default_factory=list)
    ended: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        self.peaks = [{} for _ in self.processes]
        self._thread = threading.Thread(target=self._run, name="memory watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        shares, read_at = [0] * len(self.processes), 0.0
        while not self._stop.wait(_EVERY_S):
            if time.monotonic() - read_at > _FILES_EVERY_S:
                shares, read_at = (
                    [_bytes_of(pid, "smaps_rollup", ("Pss_File",)) for pid in self.processes],
                    time.monotonic(),
                )
            for number, pid in enumerate(self.processes):
                own = _bytes_of(pid, "status", ("RssAnon", "RssShmem"))
                phase = _read(self.folder / f"phase_{number}")
                if own and phase:
                    peaks = self.peaks[number]
                    peaks[phase] = max(peaks.get(phase, 0), own + shares[number])
            left = psutil.virtual_memory().available
            if left < self.least_bytes:
                self.ended = f"ended by its watch: {left / 2**30:.1f} GiB of the machine's memory were left"
                for pid in self.processes:
                    with _gone():
                        os.kill(pid, signal.SIGKILL)
                return


def first_to_go() -> None:
    """Have the kernel end this process before any other, should it run out of memory all the same."""
    Path("/proc/self/oom_score_adj").write_text("1000")


def _gone() -> contextlib.suppress:
    return contextlib.suppress(ProcessLookupError)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended, or not begun
        return ""


def _bytes_of(pid: int, file: str, names: tuple[str, ...]) -> int:
    lines = (line.split(":") for line in _read(Path(f"/proc/{pid}/{file}")).splitlines() if ":" in line)
    return sum(int(value.split()[0]) * 1024 for name, value in lines if name in names)
