"""What `make docs` adds to MkDocs: pages from outside docs/, links to sources, the API reference.

Pages link to what the repository holds, as it lies there: `../README.md`, `../learner/sao.py`. A link to a page
leads to that page of the site, one to a module of the four packages to its page in the API reference, and of any other
file only its path is shown. A link to what is not there is a warning, which ends a strict build. Paths of modules that
stand in backticks become links too.
"""

from __future__ import annotations

import ast
import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGES = ("learner", "agent", "envs", "sandboxes")
# Pages that do not lie in docs/, and what they are called in the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
_FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<text>!?\[[^\]\n]*(?:\n[^\]\n]+)?\])\((?P<target>[^)\s]+)\)")
_MODULE_IN_BACKTICKS = re.compile(rf"(?<!\[)`(?P<path>(?:{'|'.join(PACKAGES)})/[\w/]+\.py)(?P<name>: [\w.]+)?`(?!\]\()")
_ELSEWHERE = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^"'\s>]+""")

log = logging.getLogger("mkdocs.site_hooks")  # below "mkdocs", so that a strict build counts the warnings


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the API reference, one section a room, to the navigation."""
    assert config.nav is not None
    config.nav.append({"API reference": [_section(package) for package in PACKAGES]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and a page for each module."""
    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    for package in PACKAGES:
        for module in _modules(package):
            files.append(File.generated(config, api_page(module), content=_api_markdown(module)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the repository lead to pages of the site."""
    name = page.file.src_uri
    if name.startswith("api/"):
        return markdown
    source = next((source for source, outside in OUTSIDE.items() if outside == name), f"docs/{name}")
    pieces = _FENCED.split(markdown)
    pieces[::2] = [_with_links(piece, source, name) for piece in pieces[::2]]  # the others are code
    return "".join(pieces)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warn of a page that would load something from another host."""
    for found in _ELSEWHERE.findall(output):
        if "rel=canonical" not in found:
            log.warning("%s would load from another host: %s", page.file.src_uri, found)
    return output


def api_page(module: Path) -> str:
    """learner/sao.py -> api/learner/sao.md, learner/run/__init__.py -> api/learner/run/index.md."""
    stem = module.with_suffix("").as_posix()
    return "api/" + (stem.removesuffix("__init__") + "index" if module.name == "__init__.py" else stem) + ".md"


def _with_links(markdown: str, source: str, name: str) -> str:
    """`markdown` of the file `source` of the repository as the page `name` of the site."""

    def followed(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path.startswith("docs/"):
            page = path.removeprefix("docs/")
        elif path in OUTSIDE:
            page = OUTSIDE[path]
        elif _is_module(path):
            page = api_page(Path(path))
        elif (ROOT / path).exists():
            return f"`{path}`"
        else:
            log.warning("%s links to %s, which is not there", source, match["target"])
            return match[0]
        return f"{match['text']}({_relative(page, name)}{'#' + anchor if anchor else ''})"

    def linked(match: re.Match[str]) -> str:
        if not _is_module(match["path"]):
            return match[0]
        page = _relative(api_page(Path(match["path"])), name)
        return f"[{match[0]}]({page})"

    return _MODULE_IN_BACKTICKS.sub(linked, _LINK.sub(followed, markdown))


def _relative(page: str, name: str) -> str:
    return posixpath.relpath(page, posixpath.dirname(name) or ".")


def _is_module(path: str) -> bool:
    return (
        path.startswith(tuple(f"{package}/" for package in PACKAGES))
        and path.endswith(".py")
        and (ROOT / path).is_file()
    )


def _modules(package: str) -> list[Path]:
    """Modules below `package`, relative to the repository; folders that are no packages are left out."""
    folders = [Path(folder) for folder, _, names in os.walk(ROOT / package) if "__init__.py" in names]
    return sorted(path.relative_to(ROOT) for folder in folders for path in folder.glob("*.py"))


def _section(package: str) -> dict[str, Any]:
    """A package as a part of the navigation: its own page first, then its modules, then its rooms."""
    folder = ROOT / package
    entries: list[Any] = [api_page(Path(package, "__init__.py"))]
    entries += [
        {path.stem: api_page(path.relative_to(ROOT))}
        for path in sorted(folder.glob("*.py"))
        if path.name != "__init__.py"
    ]
    rooms = sorted(path.parent for path in folder.glob("*/__init__.py"))
    entries += [_section(room.relative_to(ROOT).as_posix()) for room in rooms]
    return {folder.name: entries}


def _api_markdown(module: Path) -> str:
    """The page of a module; that of a package also lists what is in it."""
    dotted = ".".join(module.with_suffix("").parts).removesuffix(".__init__")
    page = f"---\ntitle: {dotted}\n---\n\n::: {dotted}\n"
    if module.name != "__init__.py":
        return page
    folder = ROOT / module.parent
    listed = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    listed += sorted(folder.glob("*/__init__.py"))
    rows = [f"| [`{_label(path, folder)}`]({_beside(path, folder)}) | {_first_line(path)} |" for path in listed]
    return page + "\n| | |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else page


def _label(path: Path, folder: Path) -> str:
    return f"{path.parent.name}/" if path.parent != folder else path.name


def _beside(path: Path, folder: Path) -> str:
    return posixpath.relpath(
        api_page(path.relative_to(ROOT)), posixpath.dirname(api_page(folder.relative_to(ROOT) / "x"))
    )


def _first_line(path: Path) -> str:
    words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return words.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
