"""Tests of OpenHands' tools. They run in an environment of their own (`make openhands`), on a real Docker engine:

    .venv-openhands/bin/python -m pytest -m openhands tests/openhands

Elsewhere only the choice of a scaffold is tested. SAO_REQUIRE_OPENHANDS=1 makes a missing library a failure.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import AsyncIterator

import pytest

from envs.swe_bench.scaffolds.openhands.library import have_openhands

if not have_openhands() and os.environ.get("SAO_REQUIRE_OPENHANDS") != "1":
    collect_ignore = [f"test_openhands_{name}.py" for name in ("editor", "loop", "parity", "terminal")]
else:
    from envs.swe_bench.scaffolds.openhands.scaffold import OpenHandsScaffold
    from sandboxes.docker.sandbox import DockerSandbox

    IMAGE = os.environ.get("SAO_TEST_IMAGE", "sao-base:debian")

    @pytest.fixture(scope="session", autouse=True)
    def library() -> None:
        """OpenHands' import takes up to a minute on a busy machine: not in a test's own time."""
        from envs.swe_bench.scaffolds.openhands.library import load

        load()

    @pytest.fixture(scope="session", autouse=True)
    def interruptible() -> None:
        """A background job ignores Ctrl-C, and so would every shell that it starts: OpenHands' own here."""
        signal.signal(signal.SIGINT, signal.default_int_handler)

    @pytest.fixture
    async def sandbox() -> AsyncIterator[DockerSandbox]:
        """A container with a small repository in /repo."""
        async with DockerSandbox(IMAGE) as sandbox:
            await sandbox.put("/repo/pkg/a.py", b"one = 1\ntwo = 2\nthree = 3\n")
            await sandbox.put("/repo/README.md", f"# {secrets.token_hex(4)}\n".encode())
            yield sandbox

    @pytest.fixture
    async def scaffold(sandbox: DockerSandbox) -> AsyncIterator[OpenHandsScaffold]:
        """OpenHands' tools in /repo of `sandbox`; a command without output is told after two seconds."""
        scaffold = OpenHandsScaffold(no_change_timeout_s=2)
        await scaffold.open(sandbox, "/repo")
        yield scaffold
        await scaffold.close()
