"""What dead runs left on an engine: found by its labels, and removed. The blocking half of `DockerEngine.sweep`.

A thing of ours is removed when the process that made it is gone (known only on the machine that made it), when its
time to live is over, or when it is a container that was created minutes ago and never started.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sandboxes.docker.labels import LABEL_EXPIRES, LABEL_OWNER, LABEL_PROJECT, owner_is_gone

NEVER_STARTED_S = 300.0


@dataclass(frozen=True, slots=True)
class Leftover:
    """One thing that may go, and why. `kind`: container, volume or network."""

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


def find(client: Any, project: str | None) -> list[Leftover]:
    """Return what may be removed, of `project` or (None) of all projects of ours. Blocks; raises the SDK's errors."""
    filters = {"label": LABEL_PROJECT if project is None else f"{LABEL_PROJECT}={project}"}
    left: list[Leftover] = []
    now = time.time()
    for item in client.api.containers(all=True, filters=filters):
        reason = why_remove(
            item.get("Labels") or {}, now_s=now, age_s=now - item.get("Created", now), state=item.get("State", "")
        )
        if reason:
            left.append(Leftover("container", item["Id"], (item.get("Names") or ["?"])[0].lstrip("/"), reason))
    for item in client.api.volumes(filters=filters).get("Volumes") or []:
        reason = why_remove(item.get("Labels") or {}, now_s=now)
        if reason:
            left.append(Leftover("volume", item["Name"], item["Name"], reason))
    for item in client.api.networks(filters=filters):
        reason = why_remove(item.get("Labels") or {}, now_s=now)
        if reason:
            left.append(Leftover("network", item["Id"], item["Name"], reason))
    return left


def remove(client: Any, leftovers: list[Leftover]) -> list[Leftover]:
    """Remove these things; returns those that this call has removed. Blocks; raises the SDK's errors."""
    import docker

    removal = {
        "container": lambda id: client.api.remove_container(id, force=True, v=True),
        "volume": lambda id: client.api.remove_volume(id, force=True),
        "network": client.api.remove_network,
    }
    gone = []
    for thing in leftovers:
        try:
            removal[thing.kind](thing.id)
            gone.append(thing)
        except docker.errors.NotFound:
            pass
        except docker.errors.APIError as error:
            if error.status_code != 409:  # 409: it is being removed already, or still used by a container
                raise
    return gone


def sweep(client: Any, project: str | None, dry_run: bool) -> list[Leftover]:
    """Find and, unless `dry_run`, remove; returns what was (or would be) removed. Blocks; raises the SDK's errors."""
    left = find(client, project)
    return left if dry_run else remove(client, left)
