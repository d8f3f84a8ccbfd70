"""What all tests share: a temporary folder of this process's own, so that "nothing is left" means left by this test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest


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
