"""The page: it opens without a network, nothing in a file can become markup, and every figure has a description."""

from __future__ import annotations

import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import assert_one_line, copy
from report_helpers import data_of, page_of

from weft.report import page as page_module
from weft.report.facts import CAVEATS

pytest_plugins = ["cli_helpers"]

ASSETS = Path(page_module.__file__).parent / "assets"


@pytest.fixture(scope="module")
def text(finished: Path, finished_fedavg: Path) -> str:
    return page_of(finished, finished_fedavg)


def test_a_folder_of_runs_stands_for_them(finished, finished_fedavg, tmp_path, command):
    for folder in (finished, finished_fedavg):
        shutil.copytree(folder, tmp_path / "runs" / folder.name)
    done = command("report", tmp_path / "runs", cwd=tmp_path)
    assert (done.code, done.out) == (0, "report.html\n")
    assert len(data_of((tmp_path / "report.html").read_text())["groups"]) == 2


def test_errors_are_one_line(finished, tmp_path, command):
    assert_one_line(command("report", tmp_path / "none"), "is not a run folder")
    assert_one_line(command("report", finished, "--out", tmp_path / "no" / "page.html"), "page.html", "--out")
    assert_one_line(command("report"), "DIR...")


@pytest.mark.slow
def test_a_report_loads_no_torch(finished, tmp_path):
    program = "import sys; sys.modules['torch'] = None; from weft.cli.app import main; main()"
    argv = [sys.executable, "-c", program, "report", str(finished), "--out", str(tmp_path / "page.html")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "helping-pairs-0" in data_of((tmp_path / "page.html").read_text())["figures"]


def test_the_page_is_the_same_each_time_and_loads_nothing(text, finished, finished_fedavg):
    assert page_of(finished, finished_fedavg) == text
    shell = text.replace(page_module.asset("plotly-cartesian.min.js"), "")
    assert re.findall(r'\s(?:src|href|action)\s*=\s*["\']?([^"\'\s>]+)', shell) == ["#main"]
    assert not re.search(r"@import|url\(", shell)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', shell)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'none'" in policy


def test_the_plotly_bundle_is_the_released_one():
    """plotly.js-cartesian-dist-min 4.1.1 of the npm registry."""
    blob = (ASSETS / "plotly-cartesian.min.js").read_bytes()
    assert hashlib.sha256(blob).hexdigest() == "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
    assert b"v4.1.1" in blob[:80]
    assert "MIT" in (ASSETS / "plotly-LICENSE.txt").read_text()
    assert b"</script" not in blob.lower()


def test_names_from_files_are_text(finished, tmp_path):
    evil = "<img src=x onerror=alert(1)>%{y}</script>&amp;"
    folder = copy(finished, tmp_path / "<b>run")
    plan = (folder / "plan.toml").read_text()
    assert 'name = "fedweit"' in plan
    (folder / "plan.toml").write_text(plan.replace('name = "fedweit"', f'name = "{evil}"'))
    contents = json.loads((folder / "contents.json").read_text())
    contents["layers"][0]["name"] = evil
    contents["tasks"][0][0]["name"] = evil
    (folder / "contents.json").write_text(json.dumps(contents))
    with (folder / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"at": 1.0, "event": evil, "why": evil}) + "\n")
    text = page_of(folder)
    assert text.count("</script") == 3
    assert "<img" not in text
    assert "<b>run" not in text
    assert html.escape(evil) in text
    for spec in data_of(text)["figures"].values():
        strings = re.findall(r'"((?:[^"\\]|\\.)*)"', json.dumps(spec))
        assert all("<" not in each.replace("<extra>", "").replace("</extra>", "") for each in strings)


def test_every_figure_has_a_description_and_the_setup_is_there(text, finished):
    data = data_of(text)
    labels = re.findall(r'<div class=plot role=img aria-label="([^"]*)"', text)
    assert len(labels) == len(data["figures"])
    assert all(len(each) > 10 for each in labels)
    for name in data["sections"]:
        assert re.search(r"<p class=words>[^<]{10,}", data["html"][name]), name
    for line in CAVEATS:
        assert line in html.unescape(data["html"]["helping"])
    setup = data["html"]["setup"]
    assert "learning_rate" in setup
    assert json.loads((finished / "environment.json").read_text())["packages"]["torch"] in setup
    assert "No incidents in 2 runs" in setup


def _theme(name: str) -> dict[str, str]:
    css = (ASSETS / "page.css").read_text()
    light, dark = re.findall(r':root(?:\[data-theme="dark"\])? \{(.*?)\}', css, re.DOTALL)[:2]
    return dict(re.findall(r"--(\w+): (#\w{6})", light + (dark if name == "dark" else "")))


def _contrast(one: str, other: str) -> float:
    """WCAG 2: (L1 + 0.05) / (L2 + 0.05)."""

    def luminance(color: str) -> float:
        parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colors_have_enough_contrast(theme):
    colors = _theme(theme)
    for ground in ("paper", "card"):
        for name in ("ink", "soft", "accent", "good", "warn"):
            assert _contrast(colors[name], colors[ground]) >= 4.5, (name, ground)
        for place in range(8):
            assert _contrast(colors[f"s{place}"], colors[ground]) >= 3, (place, ground)
