# ruff: noqa: E501
"""Cases K1 and K2 without a container: settings of tests in any kind of line, and whose files an install may leave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.swe_bench.grading.loaded import foreign, own_names
from envs.swe_bench.grading.protected import changes_how_tests_run

ENDS = ["\n", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


@pytest.mark.parametrize("end", ENDS, ids=[f"U+{ord(end[0]):04X}" for end in ENDS])
@pytest.mark.parametrize("before", [None, "", "[metadata]\nname = a\n"])
def test_a_section_of_pytests_is_seen_whatever_ends_its_lines(end: str, before: str | None) -> None:
    """Case K1."""
    for name, section in (("tox.ini", "[pytest]"), ("setup.cfg", "[tool:pytest]"), ("tox.ini", "[testenv]")):
        text = f"# x{end}{section}{end}addopts = -p calc.plugin{end}"
        assert changes_how_tests_run(name, before, (before or "") + text)
        assert changes_how_tests_run(name, before, "\ufeff" + text)
    assert changes_how_tests_run("pyproject.toml", before, f"# x{end}[tool.pytest.ini_options]{end}addopts = '-x'{end}")


@given(st.lists(st.sampled_from(ENDS), min_size=3, max_size=3))
def test_mixed_line_ends_hide_nothing(ends: list[str]) -> None:
    one, two, three = ends
    assert changes_how_tests_run("tox.ini", "[mypy]\n", f"[mypy]\n# x{one}[pytest]{two}addopts = -p calc.plugin{three}")


def test_settings_of_others_may_change_with_any_line_end() -> None:
    assert not changes_how_tests_run("setup.cfg", "[metadata]\r\nname = a\r\n", "[metadata]\r\nname = b\r\n")
    assert not changes_how_tests_run("setup.cfg", "[metadata]\nname = a\n", "[metadata]\nname = a\ntitle = x\u2028y\n")


OWN = own_names("org/my-lib", {"src/my_lib/__init__.py", "src/my_lib/a.py", "extra.py", "docs/x.md", "setup.py"})
SITE = "/opt/env/lib/python3.9/site-packages"


@pytest.mark.parametrize(
    "line",
    [
        f"F\t{SITE}/my_lib/a.py\t1",
        f"F\t{SITE}/my_lib/__pycache__/a.cpython-39.pyc\t1",
        f"F\t{SITE}/extra.py\t1",
        f"F\t{SITE}/__pycache__/extra.cpython-39.pyc\t1",
        f"F\t{SITE}/My_Lib-1.0-py3.9.egg/my_lib/a.py\t1",
        f"F\t{SITE}/my_lib.egg-link\t1",
        f"F\t{SITE}/__editable___my_lib_1_0_finder.py\t1",
        f"P\t{SITE}/easy-install.pth\t/testbed/src",
        f"P\t{SITE}/__editable__.my_lib-1.0.pth\timport __editable___my_lib_1_0_finder; __editable___my_lib_1_0_finder.install()",
        f"P\t{SITE}/easy-install.pth\t./My_Lib-1.0-py3.9.egg",
        f"P\t{SITE}/easy-install.pth\timport sys; sys.__plen = len(sys.path)",
        "W\t/testbed/tests/conftest.py\t1",
    ],
)
def test_an_install_of_the_repository_is_no_change(line: str) -> None:
    """Case K2."""
    assert foreign([line], workdir="/testbed", own=OWN, test_files=["tests/conftest.py"]) == []


@pytest.mark.parametrize(
    "line",
    [
        f"F\t{SITE}/numpy/__init__.py\t1",
        f"F\t{SITE}/my_lib_plugin/__init__.py\t1",
        f"F\t{SITE}/zz-1.dist-info/METADATA.py\t1",
        "F\t/opt/env/lib/python3.9/json/__init__.py\t1",
        "F\t/opt/env/lib/python3.9/my_lib.py\t1",
        f"F\t{SITE}/sitecustomize.py\t1",
        f"E\t{SITE}/zz-1.dist-info/entry_points.txt\tzz = calc.plugin",
        f"E\t{SITE}/my_lib-1.dist-info/entry_points.txt\t[pytest11]",
        "E\t/testbed/my_lib.egg-info/entry_points.txt\t[pytest11]",
        f"P\t{SITE}/x.pth\timport os",
        f"P\t{SITE}/x.pth\t/var/tmp/modules",
        f"P\t{SITE}/x.pth\t/testbed/../tmp",
        f"P\t{SITE}/x.pth\timport sys; exec(open('/testbed/a').read())",
        f"P\t{SITE}/x.pth\timport __editable___zz_1_finder; __editable___zz_1_finder.install()",
        "A\t/pytest.ini\t1",
        "W\t/testbed/conftest.py\t1",
        "C\t/testbed/tests/pyproject.toml\t",
    ],
)
def test_anything_else_that_python_may_load_is_a_change(line: str) -> None:
    assert foreign([line], workdir="/testbed", own=OWN, test_files=["tests/conftest.py"])
