# mypy: ignore-errors
# ruff: noqa: F821
"""A pytest plugin that writes what each test did as sealed records. `seal.py` is put in front of it.

Works from Python 3.5 and pytest 3 on.
"""

import os

import pytest


def _make(record, number=int, text=str):
    if record is None:
        return None
    state = [None]
    marked = set()

    def name(nodeid):
        config = state[0]
        relative = getattr(config, "cwd_relative_nodeid", None)
        return relative(nodeid) if relative else nodeid

    class Records:
        @pytest.hookimpl(tryfirst=True)
        def pytest_configure(self, config):
            state[0] = config

        @pytest.hookimpl(trylast=True)
        def pytest_collection_finish(self, session):
            for item in session.items:
                closest = getattr(item, "get_closest_marker", None) or getattr(item, "get_marker", None)
                if closest is not None and closest("xfail") is not None:
                    marked.add(item.nodeid)

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(self, report):
            record(
                kind="test",
                id=name(report.nodeid),
                when=text(report.when),
                outcome=text(report.outcome),
                wasxfail=hasattr(report, "wasxfail"),
                marked=report.nodeid in marked,
            )

        @pytest.hookimpl(tryfirst=True)
        def pytest_collectreport(self, report):
            if report.outcome != "passed":
                record(kind="collect", id=name(report.nodeid), outcome=text(report.outcome))

        @pytest.hookimpl(trylast=True)
        def pytest_sessionfinish(self, session, exitstatus):
            record(kind="finish", status=number(exitstatus))

    return Records()


_records = _make(open_records("pytest-key", "pytest-records"))
os.environ.pop("PYTEST_ADDOPTS", None)


def pytest_configure(config):
    global _records
    records, _records = _records, None
    if records is not None:
        config.pluginmanager.register(records, None)
        # Registered during the hook: newer pytest calls it for the late-comer, older ones may not.
        records.pytest_configure(config)
