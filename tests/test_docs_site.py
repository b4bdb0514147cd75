"""The documentation site builds without a warning, and its pages load nothing from a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from csv import DictReader
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev

import pytest
from test_imports import ROOMS

ROOT = Path(__file__).resolve().parent.parent
LOADING = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Loaded(HTMLParser):
    """Addresses that a browser requests when it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(LOADING.get(tag, ""))
        if address:
            self.addresses.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_every_page_of_docs_is_in_the_site(site: Path) -> None:
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert {page for page in pages if not (site / page / "index.html").exists()} == set()
    assert "weft.Plan" in (site / "api" / "index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_pages_load_nothing_from_a_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        reader = Loaded()
        reader.feed(text)
        assert 'class="mermaid"' not in text, f"{page}: the theme loads mermaid from a network"
        assert [address for address in reader.addresses if re.match(r"(\w+:)?//", address)] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_architecture_page_draws_the_folders_in_the_order_of_imports() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"^      (\w+)/", text, flags=re.MULTILINE) == list(ROOMS)


def test_readme_is_short_and_counts_the_lines_of_the_example() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "fedweit_in_one_file.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert f"{len(example.splitlines())} lines" in text


ROWS = {"FedProx with APD": "fedprox+apd", "single-task learning": "stl", "Stable-SGD": "stable-sgd"}


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_headline_results_are_those_of_the_committed_table(page: str) -> None:
    accuracy, forgetting = defaultdict(list), defaultdict(list)
    with (ROOT / "results" / "table2-cifar.csv").open(encoding="utf-8", newline="") as file:
        for line in DictReader(file):
            accuracy[line["row"]].append(100 * float(line["accuracy"]))
            forgetting[line["row"]].append(float(line["forgetting"]))
    rows = re.findall(
        r"^\| ([\w -]+?)(?: \(no server\))? \| ([\d.]+)(?: ± ([\d.]+))? %(?:, forgetting (\.\d+))? \| [\d.]+ %",
        (ROOT / page).read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    assert len(rows) >= 6
    for name, mean, deviation, drop in rows:
        row = ROWS.get(name, name.lower())
        assert mean == f"{fmean(accuracy[row]):.1f}", name
        assert deviation == (f"{stdev(accuracy[row]):.1f}" if len(accuracy[row]) > 1 else ""), name
        assert not drop or drop == f"{fmean(forgetting[row]):.3f}"[1:], name
