"""Remove the containers, volumes and networks that dead runs left on a Docker engine.

A thing of ours is removed when the process that made it is gone (known only on the machine that made it), when its
time to live is over, or when it is a container that was created minutes ago and never started.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sandboxes.base import SandboxFault
from sandboxes.docker_engine import LABEL_EXPIRES, LABEL_OWNER, LABEL_PROJECT, DockerEngine, owner_is_gone

NEVER_STARTED_S = 300.0


@dataclass(frozen=True, slots=True)
class Swept:
    """One thing that was removed (or would be). `kind`: container, volume or network."""

    kind: str
    id: str
    name: str
    reason: str


def why_remove(labels: dict[str, str], *, now_s: float, age_s: float = 0.0, state: str = "") -> str:
    """Return why a thing with these labels may go, or "" if it must stay. `state` is a container's ("created", ...)."""
    if owner_is_gone(labels.get(LABEL_OWNER, "")):
        return "owner gone"
    try:
        if now_s > float(labels.get(LABEL_EXPIRES, "inf")):
            return "time to live over"
    except ValueError:
        return "unreadable time to live"
    if state == "created" and age_s > NEVER_STARTED_S:
        return "never started"
    return ""


def _sweep(client: Any, project: str | None, dry_run: bool) -> list[Swept]:
    import docker

    filters = {"label": LABEL_PROJECT if project is None else f"{LABEL_PROJECT}={project}"}
    found: list[Swept] = []
    now = time.time()
    for item in client.api.containers(all=True, filters=filters):
        reason = why_remove(
            item.get("Labels") or {}, now_s=now, age_s=now - item.get("Created", now), state=item.get("State", "")
        )
        if reason:
            found.append(Swept("container", item["Id"], (item.get("Names") or ["?"])[0].lstrip("/"), reason))
    for item in client.api.volumes(filters=filters).get("Volumes") or []:
        reason = why_remove(item.get("Labels") or {}, now_s=now)
        if reason:
            found.append(Swept("volume", item["Name"], item["Name"], reason))
    for item in client.api.networks(filters=filters):
        reason = why_remove(item.get("Labels") or {}, now_s=now)
        if reason:
            found.append(Swept("network", item["Id"], item["Name"], reason))
    if dry_run:
        return found
    remove = {
        "container": lambda id: client.api.remove_container(id, force=True, v=True),
        "volume": lambda id: client.api.remove_volume(id, force=True),
        "network": client.api.remove_network,
    }
    gone = []
    for thing in found:
        try:
            remove[thing.kind](thing.id)
            gone.append(thing)
        except docker.errors.NotFound:
            pass
        except docker.errors.APIError as error:
            if error.status_code != 409:  # 409: it is being removed already, or still used by a container
                raise
    return gone


async def sweep(engine: DockerEngine, *, project: str | None = None, dry_run: bool = False) -> list[Swept]:
    """Remove what dead runs left on `engine`; returns what was (with `dry_run`: would be) removed.

    Only things that carry our labels are looked at; with `project`, only those of that project.
    Raises `SandboxFault` if the engine does not answer.
    """
    return await engine.call(lambda: _sweep(engine.client, project, dry_run), timeout_s=300)


async def _main(hosts: list[str], project: str | None, dry_run: bool) -> int:
    status = 0
    for host in hosts or [""]:
        engine = DockerEngine(host)
        try:
            swept = await sweep(engine, project=project, dry_run=dry_run)
        except SandboxFault as error:
            print(error, file=sys.stderr)
            status = 1
            continue
        finally:
            await engine.close()
        for thing in swept:
            verb = "would remove" if dry_run else "removed"
            print(f"{engine.url}: {verb} {thing.kind} {thing.id[:12]} {thing.name} ({thing.reason})")
        stamp = datetime.now().isoformat(timespec="seconds")
        print(f"{engine.url}: {len(swept)} {'to remove' if dry_run else 'removed'} at {stamp}")
    return status


def main(arguments: list[str] | None = None) -> int:
    """Sweep the engines named on the command line; exit status 1 if one does not answer."""
    parser = argparse.ArgumentParser(
        prog="python -m sandboxes.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m sandboxes.sweep --dry-run --host tcp://10.0.0.7:2375",
    )
    parser.add_argument("--host", action="append", default=[], metavar="URL", help="an engine; may be repeated")
    parser.add_argument("--project", help="only what carries this project label (default: all that is ours)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    given = parser.parse_args(arguments)
    return asyncio.run(_main(given.host, given.project, given.dry_run))


if __name__ == "__main__":
    raise SystemExit(main())
