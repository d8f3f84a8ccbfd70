"""`DockerSettings`: what a container may be and use."""

from __future__ import annotations

from dataclasses import dataclass, field

from sandboxes.base import Limits
from sandboxes.docker.labels import PROJECT

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER")


@dataclass(frozen=True, slots=True)
class DockerSettings:
    """What a container may be and use.

    `limits` are those of a run that names none: `wall_clock_s` and `output_bytes` hold for each run, `cpu_s` for each
    of its processes; memory, processes and CPUs are the container's, below. `user` "" is the image's. `ttl_s` is how
    long the container lives at most. `runtime` "" is the engine's own ("runsc" is gVisor). `disk_bytes` needs an engine
    whose storage has quotas (overlay2 on xfs with pquota).
    """

    memory_bytes: int = 4 * 2**30
    cpus: float = 2.0
    pids: int = 512
    network: str = "none"
    runtime: str = ""
    user: str = ""
    workdir: str = ""
    ttl_s: float = 4 * 3600.0
    environment: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=lambda: Limits(wall_clock_s=120.0))
    capabilities: tuple[str, ...] = CAPABILITIES
    disk_bytes: int | None = None
    project: str = PROJECT
