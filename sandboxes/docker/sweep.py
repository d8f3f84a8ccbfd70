"""Remove the containers, volumes and networks that dead runs left on a Docker engine.

A thing of ours is removed when the process that made it is gone (known only on the machine that made it), when its
time to live is over, or when it is a container that was created minutes ago and never started.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from datetime import datetime

from sandboxes.base import SandboxFault
from sandboxes.docker.engine import DockerEngine


async def _main(hosts: list[str], project: str | None, dry_run: bool) -> int:
    status = 0
    for host in hosts or [""]:
        engine = DockerEngine(host)
        try:
            removed = await engine.sweep(project, dry_run=dry_run)
        except SandboxFault as error:
            print(error, file=sys.stderr)
            status = 1
            continue
        finally:
            await engine.close()
        for thing in removed:
            verb = "would remove" if dry_run else "removed"
            print(f"{engine.url}: {verb} {thing.kind} {thing.id[:12]} {thing.name} ({thing.reason})")
        stamp = datetime.now().isoformat(timespec="seconds")
        print(f"{engine.url}: {len(removed)} {'to remove' if dry_run else 'removed'} at {stamp}")
    return status


def main(arguments: list[str] | None = None) -> int:
    """Sweep the engines named on the command line; exit status 1 if one does not answer."""
    parser = argparse.ArgumentParser(
        prog="python -m sandboxes.docker.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m sandboxes.docker.sweep --dry-run --host tcp://10.0.0.7:2375",
    )
    parser.add_argument("--host", action="append", default=[], metavar="URL", help="an engine; may be repeated")
    parser.add_argument("--project", help="only what carries this project label (default: all that is ours)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    given = parser.parse_args(arguments)
    return asyncio.run(_main(given.host, given.project, given.dry_run))


if __name__ == "__main__":
    raise SystemExit(main())
