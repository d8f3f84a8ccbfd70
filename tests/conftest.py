"""What all tests share: a temporary folder of this process's own, so that "nothing is left" means left by this test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # OpenHands' environment has none, and needs none
    pass
else:
    # An example that takes 0.2 s on a busy machine is no failure; nor are examples that take long to make.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder() -> Iterator[None]:
    """Sandboxes of another worker, running beside this one, put their folders elsewhere."""
    with tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as folder:
        before, tempfile.tempdir = tempfile.tempdir, folder
        os.environ["TMPDIR"] = folder
        # Users that sandboxes drop to must be able to pass through.
        os.chmod(folder, 0o711)
        yield
        tempfile.tempdir = before


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked `slow` out unless `-m` asks for them, and give those that share a fixture to one worker."""
    if "slow" not in (config.option.markexpr or ""):
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if not item.get_closest_marker("slow")]
    for item in items:
        # What a module's tests share is what is costly to make: two workers would make it twice.
        shared = any(
            fixture.scope == "module"
            for fixtures in item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
            for fixture in fixtures
        )
        if shared and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
