"""The three ways to a registered environment, each in a real installation: wheel, editable, neither."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKE = "import gymnasium; env = gymnasium.make('sao/PythonTIR-v0'); print(env.unwrapped.task_ids[0]); env.close()"


def run(python: Path, code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` far from the checkout, so that only what is installed is found."""
    # Byte code is cached as by default: the cost of a start is that of every start but the first.
    dropped = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "SAO_NO_GYMNASIUM_HOOK")
    clean = {k: v for k, v in os.environ.items() if k not in dropped}
    return subprocess.run(
        [str(python), *arguments, "-c", code],
        cwd="/",
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def install(folder: Path, editable: bool) -> Path:
    """A fresh environment with this project installed as pip does it, and the dependencies of this one."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    target = ["--editable", str(ROOT)] if editable else [str(ROOT)]
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet",
         "--no-deps", "--no-index", "--no-build-isolation", *target],
        check=True,
        timeout=110,
        capture_output=True,
        # The build runs under the new environment's interpreter, which must find hatchling.
        env={**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")},
    )  # fmt: skip
    # Only plain paths in it: the dependencies are found, but no other .pth file of this environment runs.
    (site / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp(request.param) / "venv", request.param == "editable")


def test_a_bare_id_works_with_nothing_imported_first(python: Path) -> None:
    done = run(python, MAKE)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"\w+/0-0\n", done.stdout)


def test_importing_gymnasium_alone_loads_none_of_the_project(python: Path) -> None:
    done = run(python, "import gymnasium, sys; print('sao/PythonTIR-v0' in gymnasium.registry, 'envs' in sys.modules)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True False\n", "")


@pytest.mark.parametrize(
    ("code", "opted_out"), [("import envs; " + MAKE, "1"), (MAKE.replace("sao/", "envs:sao/"), "")]
)
def test_the_conventional_ways_work_with_and_without_the_hook(python: Path, code: str, opted_out: str) -> None:
    done = run(python, code, SAO_NO_GYMNASIUM_HOOK=opted_out)
    assert (done.returncode, done.stderr) == (0, ""), "also no warning about registering twice"


def test_type_checkers_find_the_hints_of_all_four_packages(python: Path) -> None:
    """PEP 561: a package without `py.typed` counts as untyped, whatever its sources say."""
    code = (
        "from importlib.util import find_spec\n"
        "from pathlib import Path\n"
        "for name in ('learner', 'agent', 'envs', 'sandboxes'):\n"
        "    print(name, Path(find_spec(name).origin).with_name('py.typed').is_file())\n"
    )
    done = run(python, code)
    assert (done.returncode, set(done.stdout.split()[1::2])) == (0, {"True"}), done.stdout + done.stderr


def test_the_opt_out_leaves_gymnasium_alone(python: Path) -> None:
    done = run(python, "import gymnasium; print('sao/PythonTIR-v0' in gymnasium.registry)", SAO_NO_GYMNASIUM_HOOK="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_make_vec_works_in_spawned_workers(python: Path, tmp_path: Path) -> None:
    """A spawned worker is a fresh interpreter: the hook must be there too."""
    script = tmp_path / "script.py"
    script.write_text(
        "import gymnasium\n"
        "if __name__ == '__main__':\n"
        "    v = gymnasium.make_vec('sao/PythonTIR-v0', num_envs=2, vectorization_mode='async',\n"
        "                           vector_kwargs={'context': 'spawn'},\n"
        "                           problems=[{'problem': '1+1?', 'answer': '2'}])\n"
        "    print(v.reset(seed=1)[0])\n"
        "    v.close()\n"
    )
    done = subprocess.run([str(python), str(script)], cwd="/", capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout) == (0, "('1+1?', '1+1?')\n"), done.stderr


def test_interpreter_start_costs_under_a_millisecond(python: Path) -> None:
    lines = [
        re.search(r"\|\s+(\d+) \|\s+_sao_gymnasium_hook", run(python, "pass", "-X", "importtime").stderr)
        for _ in range(7)
    ]
    microseconds = [int(match[1]) for match in lines if match]
    assert len(microseconds) == 7
    assert min(microseconds) < 1000  # other work on the machine only ever adds


def test_a_broken_installation_does_not_break_the_interpreter(tmp_path: Path) -> None:
    """The .pth file is left behind and its module is gone."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(run(python, "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    (site / "sao_gymnasium_hook.pth").write_text((ROOT / "sao_gymnasium_hook.pth").read_text())
    done = run(python, "print('fine')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_importing_the_package_is_light() -> None:
    heavy = ("torch", "gymnasium", "numpy", "reasoning_gym", "datasets")
    code = f"import sys, envs; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_environment_runs_without_torch() -> None:
    code = f"import sys; sys.modules['torch'] = None; import envs; {MAKE}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def beside(tmp_path: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Make an environment where another `envs` comes first on the path."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = f"import _sao_gymnasium_hook as h; h.install(); import envs; {MAKE}; print(envs.__file__)"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd="/", env=environment, capture_output=True, text=True, timeout=110, check=False
    )


def test_ids_resolve_beside_a_foreign_package_called_envs(tmp_path: Path) -> None:
    done = beside(tmp_path, {"envs/__init__.py": "", "envs/mine.py": ""})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"{tmp_path}/envs/__init__.py\n"), "theirs is left alone"


@pytest.mark.parametrize(
    "files", [{"envs/__init__.py": "", "envs/core.py": ""}, {"envs.py": ""}], ids=["same module", "no package"]
)
def test_a_clash_with_a_foreign_package_called_envs_is_named(tmp_path: Path, files: dict[str, str]) -> None:
    done = beside(tmp_path, files)
    assert done.returncode == 1
    assert "another package called `envs`" in done.stderr
    assert str(tmp_path) in done.stderr
