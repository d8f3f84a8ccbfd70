"""Hold sandbox backends to their contract: which promises each of them keeps, breaks, and does not make.

Exit status: 0 all promises are kept, 1 one is broken, 2 a backend that is unknown or does not work here.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Callable

from sandboxes.backends import BACKENDS, try_backends
from sandboxes.base import Limits, Sandbox, SandboxFault
from sandboxes.conformance.check import Make, started
from sandboxes.conformance.report import Outcome, check_sandbox
from sandboxes.docker.sandbox import DockerSandbox
from sandboxes.docker.settings import DockerSettings

IMAGE = "sao-base:debian"


def docker(image: str) -> Callable[[Limits], DockerSandbox]:
    """How a container of `image` is made with certain limits: memory and processes are the container's as a whole."""

    def make(limits: Limits) -> DockerSandbox:
        settings = DockerSettings(
            memory_bytes=limits.memory_bytes, pids=limits.processes, limits=limits, workdir="/tmp", ttl_s=600
        )
        return DockerSandbox(image, settings=settings)

    return make


async def report(name: str, make: Make[Sandbox], *, verbose: bool) -> int:
    """Print how one backend fares; returns the exit status."""
    try:
        async with started(make):
            pass
    except SandboxFault as error:
        print(f"{name}: does not work here: {error}", file=sys.stderr)
        return 2
    results = await check_sandbox(make)
    counts = Counter(result.outcome for result in results)
    seconds = sum(result.duration_s for result in results)
    print(f"{name}: {', '.join(f'{counts[outcome]} {outcome}' for outcome in Outcome)} ({seconds:.0f} s)")
    for result in results:
        if verbose or result.outcome is not Outcome.KEPT:
            print(f"  {result.outcome:12}  {result.check.name}: {result.problem or result.check.promise}")
    return 1 if counts[Outcome.BROKEN] else 0


def main(arguments: list[str] | None = None) -> int:
    """Check the backends named on the command line, or all that work here without an engine."""
    parser = argparse.ArgumentParser(
        prog="python -m sandboxes.conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m sandboxes.conformance bubblewrap docker --image sao-base:debian",
    )
    names = (*BACKENDS, "docker")
    parser.add_argument(
        "backends", nargs="*", metavar="BACKEND", help=f"{', '.join(names)} (default: those that work, but for docker)"
    )
    parser.add_argument("--image", default=IMAGE, help="what docker makes its containers from (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="name the promises that are kept too")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.backends if name not in names]
    if unknown:
        parser.error(f"there is no backend {unknown[0]!r}; there are {', '.join(names)}")
    makers: dict[str, Make[Sandbox]] = {**BACKENDS, "docker": docker(given.image)}
    chosen = given.backends or [status.name for status in try_backends() if status.available]
    return max(asyncio.run(report(name, makers[name], verbose=given.verbose)) for name in chosen)


if __name__ == "__main__":
    sys.exit(main())
