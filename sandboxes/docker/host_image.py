"""A base image made of this machine's own Debian packages: no registry, no download but what apt is missing.

The packages asked for, those they depend on and the essential ones are looked up in dpkg's records, and their files
as they are installed here go into one layer, root's all of them. Nothing else of this machine is in it: the user
list is the packaged one, and no file that no package owns is read.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from sandboxes.base import SandboxFault
from sandboxes.docker.engine import DockerEngine, fault

TAG = "sao-base:debian"
PACKAGES = ("bash", "coreutils", "findutils", "grep", "sed", "patch", "procps", "git", "python3", "python3-pytest")
LABEL = "sao.host_image"
IMPORT_S = 900
OTHERWISE = "Elsewhere, take any image with sh, git and python3: docker pull IMAGE && docker tag IMAGE " + TAG
LEFT_OUT = re.compile(
    r"^/(\.$|dev|proc|sys|run|boot|usr/share/(doc|man|locale|info|lintian|bash-completion|bug|gitweb)/)"
)
MERGED = re.compile(r"^/(bin|sbin|lib|lib32|lib64|libx32)/")
FOLDERS = ("/bin", "/sbin", "/lib", "/lib64", "/home", "/mnt", "/opt", "/root", "/srv", "/tmp", "/var", "/var/tmp")
MADE_AT_INSTALLATION = ("/usr/bin/sh", "/etc/nsswitch.conf", "/etc/ssl/certs/ca-certificates.crt")


def installed() -> dict[str, tuple[str, list[list[str]], bool]]:
    """Return name -> (version, dependencies as lists of alternatives, essential) of dpkg's installed packages.

    Virtual names that an installed package provides are there too.
    """
    form = "${Package}\t${db:Status-Abbrev}\t${Version}\t${Pre-Depends}, ${Depends}\t${Provides}\t${Essential}\n"
    rows = subprocess.run(["dpkg-query", "-W", "-f", form], capture_output=True, text=True, check=True).stdout
    known: dict[str, tuple[str, list[list[str]], bool]] = {}
    virtual: dict[str, str] = {}
    for row in rows.splitlines():
        name, status, version, depends, provides, essential = row.split("\t")
        if not status.startswith("ii"):
            continue
        known[name] = (version, [names(choice.split("|")) for choice in depends.split(",")], essential == "yes")
        virtual.update(dict.fromkeys(names(provides.split(",")), name))
    for name, provider in virtual.items():
        known.setdefault(name, ("", [[provider]], False))
    return known


def names(relations: Iterable[str]) -> list[str]:
    """Return the package names of relations such as `libc6:any (>= 2.34)`."""
    return [name for text in relations if (name := re.split(r"[\s:(]", text.strip(), maxsplit=1)[0])]


def closure(wanted: Iterable[str], known: dict[str, tuple[str, list[list[str]], bool]]) -> dict[str, str]:
    """Return name -> version of the essential packages, those wanted and all they depend on.

    Raises KeyError for a wanted one that is not installed.
    """
    versions: dict[str, str] = {}
    todo = [*wanted, *(name for name, (_, _, essential) in known.items() if essential)]
    seen = set(todo)
    while todo:
        name = todo.pop()
        version, depends, _ = known[name]
        if version:
            versions[name] = version
        for choice in depends:
            fresh = [other for other in choice if other in known and other not in seen]
            seen.update(fresh)
            todo.extend(fresh)
    return versions


def files(packages: Iterable[str]) -> Iterator[str]:
    """Yield the paths (absolute, merged /usr) of what these packages have installed, with compiled Python beside it."""
    listed = subprocess.run(["dpkg-query", "-L", *packages], capture_output=True, text=True, check=True).stdout
    links = [link for link in glob.glob("/usr/bin/*") if os.path.islink(link)]
    alternatives = [link for link in links if os.readlink(link).startswith("/etc/alternatives/")]
    paths = {MERGED.sub(r"/usr/\1/", line) for line in listed.splitlines() if line.startswith("/")}
    paths.update(FOLDERS, MADE_AT_INSTALLATION, alternatives, map(os.readlink, alternatives))
    for path in sorted(paths):
        if LEFT_OUT.match(path) or not os.path.lexists(path):
            continue
        yield path
        if path.endswith(".py"):
            folder, name = os.path.split(path)
            # Without it each container would compile its imports anew.
            yield from glob.glob(f"{folder}/__pycache__/{name[:-3]}.cpython-*.pyc")


def install_missing(wanted: Iterable[str]) -> None:
    """Install with apt what is wanted and not there; raises `SandboxFault` where that is not possible."""
    if shutil.which("dpkg-query") is None:
        raise SandboxFault(f"the base image is made of Debian packages, and this system has none. {OTHERWISE}")
    known = installed()
    missing = [name for name in wanted if name not in known]
    if not missing:
        return
    if os.geteuid() != 0:
        raise SandboxFault(f"packages are missing for the base image; as root: apt-get install {' '.join(missing)}")
    print(f"apt-get install {' '.join(missing)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "-qq"]
    install = [*apt, "install", "-y", "--no-install-recommends", *missing]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "env": environment}
    if subprocess.run(install, **quiet, check=False).returncode == 0:  # type: ignore[call-overload]
        return
    subprocess.run([*apt, "update"], **quiet, check=False)  # type: ignore[call-overload]
    done = subprocess.run(install, **quiet, check=False)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise SandboxFault(f"apt-get install {' '.join(missing)} failed: {done.stderr[-2000:]}. {OTHERWISE}")


@contextlib.contextmanager
def one_at_a_time(tag: str) -> Iterator[None]:
    """Hold a lock of this user for building `tag`."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sao"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{re.sub('[^A-Za-z0-9.]', '_', tag)}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(tag: str = TAG, packages: Iterable[str] = PACKAGES, *, host: str = "", force: bool = False) -> bool:
    """Make the image `tag` on the engine at `host` (see `DockerEngine`) unless it is there and up to date.

    Returns whether it was made. Blocks, 10-60 s; builders of one user wait for each other. Raises `SandboxFault`.
    """
    wanted = list(dict.fromkeys(packages))
    engine = DockerEngine(host)
    client = engine.client
    import docker
    import requests

    try:
        with one_at_a_time(tag):
            client.ping()
            install_missing(wanted)
            chosen = closure(wanted, installed())
            key = hashlib.sha256(repr((1, sorted(chosen.items()))).encode()).hexdigest()[:16]
            with contextlib.suppress(docker.errors.ImageNotFound):
                if not force and client.api.inspect_image(tag)["Config"]["Labels"].get(LABEL) == key:
                    return False
            _import(client, tag, chosen, key)
            return True
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise fault(engine.url, error) from error
    finally:
        client.close()


def _import(client: object, tag: str, chosen: dict[str, str], key: str) -> None:
    with tempfile.TemporaryDirectory(prefix="sao-image-") as stage:
        etc = Path(stage) / "etc"
        etc.mkdir()
        for name in ("passwd", "group"):
            shutil.copyfile(f"/usr/share/base-passwd/{name}.master", etc / name)
        listing = Path(stage) / "listing"
        listing.write_bytes(b"\0".join(os.fsencode(path[1:]) for path in files(chosen)))
        command = ["tar", "-c", "--numeric-owner", "--owner=0", "--group=0", "--ignore-failed-read", "-C", "/"]
        command += ["--no-recursion", "--null", "-T", str(listing), "-C", stage, "etc/passwd", "etc/group"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tar:
            repository, _, version = tag.partition(":")
            api = client.api  # type: ignore[attr-defined]
            api.timeout = IMPORT_S
            answer = api.import_image_from_stream(
                tar.stdout,
                repository=repository,
                tag=version or "latest",
                changes=[
                    "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                    "ENV LANG=C.UTF-8",
                    f"LABEL {LABEL}={key}",
                    'CMD ["/bin/bash"]',
                ],
            )
            _, complaints = tar.communicate()
        if tar.returncode != 0 or "error" in answer.lower():
            raise SandboxFault(f"the base image was not made: {answer[-500:]} {complaints[-500:].decode()}")


def main(arguments: list[str] | None = None) -> int:
    """Build the base image; exit status 1 with the reason if that is not possible."""
    parser = argparse.ArgumentParser(
        prog="python -m sandboxes.docker.host_image",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m sandboxes.docker.host_image --tag sao-base:gcc --package gcc --package libc6-dev",
    )
    parser.add_argument("--tag", default=TAG, help="the image's name (default: %(default)s)")
    parser.add_argument(
        "--package", action="append", default=[], metavar="NAME", help=f"beside {', '.join(PACKAGES)}; may be repeated"
    )
    parser.add_argument("--host", default="", metavar="URL", help="the engine (default: $DOCKER_HOST, else the socket)")
    parser.add_argument("--force", action="store_true", help="build even if it is up to date")
    given = parser.parse_args(arguments)
    begun = time.monotonic()
    print(f"{given.tag}: looking at this machine's packages", flush=True)
    try:
        made = build(given.tag, [*PACKAGES, *given.package], host=given.host, force=given.force)
    except SandboxFault as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{given.tag}: {f'built in {time.monotonic() - begun:.0f} s' if made else 'up to date'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
