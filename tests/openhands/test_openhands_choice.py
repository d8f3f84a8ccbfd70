"""Which scaffold an agent gets, with OpenHands' libraries and without them."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from envs.swe_bench.scaffolds import choice
from envs.swe_bench.scaffolds.bash import BashScaffold
from envs.swe_bench.scaffolds.choice import make_scaffold
from envs.swe_bench.scaffolds.openhands.library import OpenHandsMissing, have_openhands
from envs.swe_bench.scaffolds.openhands.scaffold import OpenHandsScaffold

HAVE_OPENHANDS = have_openhands()
pytestmark = [pytest.mark.openhands, pytest.mark.timeout(300)] if HAVE_OPENHANDS else []


def test_auto_is_openhands_where_it_is_and_says_once_where_it_is_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_said", False)
    caplog.set_level(logging.WARNING)
    made = [make_scaffold("auto"), make_scaffold("auto")]
    said = [record for record in caplog.records if "OpenHands" in record.getMessage()]
    if HAVE_OPENHANDS:
        assert all(isinstance(each, OpenHandsScaffold) for each in made)
        assert not said
    else:
        assert all(isinstance(each, BashScaffold) for each in made)
        assert len(said) == 1


def test_making_scaffolds_imports_no_openhands() -> None:
    code = (
        "import sys; from envs.swe_bench.scaffolds.choice import make_scaffold; make_scaffold('openhands'); "
        "make_scaffold('bash'); sys.exit(any(name.partition('.')[0] in ('openhands', 'torch') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.skipif(HAVE_OPENHANDS, reason="the libraries are here")
def test_a_missing_library_is_told_with_the_way_to_get_it() -> None:
    with pytest.raises(OpenHandsMissing, match=r"sao-agents\[openhands\]"):
        OpenHandsScaffold().opening("issue", "/repo")
