# mypy: ignore-errors
"""A pytest plugin that writes what each test did to a file, as numbered, sealed records.

It is loaded before the code under test and keeps hold of what it needs, so that code which replaces `open` or `print`
later changes nothing. Works from Python 3.5 and pytest 3 on.
"""

import hashlib
import hmac
import json
import os

import pytest

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _make(
    write=os.write, dumps=json.dumps, seal=hmac.new, digest=hashlib.sha256, number=int, text=str, getpid=os.getpid
):
    try:
        with open(os.path.join(_FOLDER, "key"), "rb") as file:
            key = file.read()
        os.unlink(os.path.join(_FOLDER, "key"))
    except OSError:  # a process that was started by the tests: only the first one reports
        return None
    out = os.open(os.path.join(_FOLDER, "records"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    state = [0, None]
    owner = getpid()

    def record(**fields):
        if getpid() != owner:  # a fork of the tests
            return
        fields["n"] = state[0]
        state[0] += 1
        body = dumps(fields, sort_keys=True).encode("ascii")
        write(out, seal(key, body, digest).hexdigest().encode("ascii") + b" " + body + b"\n")

    def name(nodeid):
        config = state[1]
        relative = getattr(config, "cwd_relative_nodeid", None)
        return relative(nodeid) if relative else nodeid

    class Records:
        @pytest.hookimpl(tryfirst=True)
        def pytest_configure(self, config):
            state[1] = config

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(self, report):
            record(
                kind="test",
                id=name(report.nodeid),
                when=text(report.when),
                outcome=text(report.outcome),
                wasxfail=hasattr(report, "wasxfail"),
            )

        @pytest.hookimpl(tryfirst=True)
        def pytest_collectreport(self, report):
            if report.outcome != "passed":
                record(kind="collect", id=name(report.nodeid), outcome=text(report.outcome))

        @pytest.hookimpl(trylast=True)
        def pytest_sessionfinish(self, session, exitstatus):
            record(kind="finish", status=number(exitstatus))

    return Records()


_records = _make()
os.environ.pop("PYTEST_ADDOPTS", None)


def pytest_configure(config):
    global _records
    records, _records = _records, None
    if records is not None:
        config.pluginmanager.register(records, None)
        # Registered during the hook: newer pytest calls it for the late-comer, older ones may not.
        records.pytest_configure(config)
