"""Publish the repository files that pages of docs/ link to.

Pages link to ../FIDELITY.md, ../results/table1.md or ../src/weft/plan.py, so that the links work where the repository
is browsed. MkDocs only knows files below docs/. These hooks add every linked file to the site, under `repository/`:
Markdown as a page, an image unchanged, anything else as a page with a listing, and rewrite the links accordingly. A
link to a file that does not exist stays unchanged, and `mkdocs build --strict` fails on it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?(\))")
IMAGES = {".png", ".svg"}
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}


def repository_path(uri: str) -> str:
    """The path in the repository of a file of the site."""
    if not uri.startswith("repository/"):
        return f"docs/{uri}"
    path = uri.removeprefix("repository/")
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def site_uri(path: str) -> str:
    """The name in the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    rendered = path.endswith(".md") or Path(path).suffix in IMAGES
    return f"repository/{path}" if rendered else f"repository/{path}.md"


def targets(text: str, path: str) -> list[str]:
    """Existing files of the repository that the Markdown text of `path` links to."""
    linked = (posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2])) for match in LINK.finditer(text))
    return [target for target in linked if (ROOT / target).is_file()]


def content(path: str) -> str | bytes:
    file = ROOT / path
    if file.suffix in IMAGES:
        return file.read_bytes()
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.endswith(".md"):
            continue
        for target in targets((ROOT / path).read_text(encoding="utf-8"), path):
            if target not in seen and not target.startswith("docs/"):
                seen.add(target)
                waiting.append(target)
                level = InclusionLevel.NOT_IN_NAV
                files.append(File.generated(config, site_uri(target), content=content(target), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    path = repository_path(page.file.src_uri)
    if not path.endswith(".md"):
        return markdown  # a listing: not Markdown
    here = posixpath.dirname(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        if not (ROOT / target).is_file():
            return match[0]
        return f"{match[1]}{posixpath.relpath(site_uri(target), here or '.')}{match[3] or ''}{match[4]}"

    return LINK.sub(rewritten, markdown)
