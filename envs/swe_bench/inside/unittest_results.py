# mypy: ignore-errors
# ruff: noqa: F821
"""Writes what each unittest did as sealed records. Loaded as `sitecustomize`; `seal.py` is put in front of it.

All results of unittest, Django's among them, are subclasses of `unittest.TestResult` and tell it what happened: it is
there that the records are made. Works from Python 3.5 on.
"""


def _watch(record):
    import unittest

    # Kept hold of: a result that is told again by a class of the code under test is told to these all the same.
    result = unittest.TestResult
    runs = {}

    def run_of(self):
        # The object stays in the dictionary, so that no other one gets its id.
        return runs.setdefault(id(self), (len(runs), self))[0]

    def told(self, test, outcome):
        description = getattr(test, "shortDescription", lambda: None)
        try:
            name, words = str(test), description() or ""
        except Exception:
            name, words = repr(type(test)), ""
        record(kind="unit", run=run_of(self), id=name, words=words, outcome=outcome)

    def wrap(method, outcome, of=lambda test, *rest: test, when=lambda *rest: True):
        original = getattr(result, method)

        def method_told(self, test, *rest, **more):
            if when(*rest):
                told(self, of(test, *rest), outcome)
            return original(self, test, *rest, **more)

        method_told.__name__ = method
        setattr(result, method, method_told)

    wrap("startTest", "start")
    wrap("addSuccess", "PASSED")
    wrap("addFailure", "FAILED")
    wrap("addError", "ERROR")
    wrap("addSkip", "SKIPPED")
    wrap("addExpectedFailure", "XFAIL")
    wrap("addUnexpectedSuccess", "XPASS")
    wrap("addSubTest", "FAILED", when=lambda subtest, error=None: error is not None)
    original = result.stopTestRun

    def stopTestRun(self):
        record(
            kind="finish",
            run=run_of(self),
            ran=self.testsRun,
            bad=len(self.failures) + len(self.errors) + len(getattr(self, "unexpectedSuccesses", ())),
        )
        return original(self)

    result.stopTestRun = stopTestRun


_record = open_records("unittest-key", "unittest-records")
if _record is not None:
    _watch(_record)
    del _record
