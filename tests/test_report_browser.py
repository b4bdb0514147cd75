"""The pages in real headless Chromium: no complaint in the console, nothing fetched, switches and news that work."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_helpers import Browser, chromium
from cli_helpers import TINY, copy, tiny
from report_helpers import page_of
from test_report_watch import serving

import weft

pytest_plugins = ["cli_helpers"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def page(finished: Path, finished_fedavg: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    weft.run(tiny(method="stl"), folder / "stl")
    weft.run(tiny(seed=1), folder / "s1")
    file = folder / "report.html"
    file.write_text(page_of(finished, folder / "s1", finished_fedavg, folder / "stl"))
    return file.as_uri()


@pytest.fixture
def opened(browser: Browser, page: str) -> Browser:
    browser.size(1280, 900)
    browser.theme("light")
    browser.requests()
    browser.complaints()
    browser.open(page)
    return browser


def test_it_opens_without_a_complaint_and_without_a_network(opened, page, tmp_path):
    names = opened.run("return [...document.querySelectorAll('figure:not([hidden])')].map((one) => one.dataset.name)")
    assert len(names) >= 10
    for name in names:
        opened.show(name)
    assert opened.complaints() == []
    assert opened.requests() == [page]
    assert len(opened.picture(tmp_path / "page.png")) > 20_000


def test_hover_and_switches_of_methods(opened):
    opened.show("accuracy-after")
    opened.run(
        "const plot = document.querySelector('#fig-accuracy-after .plot');"
        "Plotly.Fx.hover(plot, [{curveNumber: 1, pointNumber: 1}])"
    )
    words = opened.until(
        lambda: opened.run("return document.querySelector('#fig-accuracy-after .hoverlayer').textContent")
    )
    assert "after task 1" in words
    assert "±" in words
    assert opened.complaints() == []
    assert {"fedweit", "fedavg", "stl"} <= set(opened.traces("accuracy-after"))
    opened.click("[data-group='1']")
    assert "fedavg" not in opened.traces("accuracy-after")
    assert opened.run("return document.querySelector(\"[data-group='1']\").getAttribute('aria-pressed')") == "false"
    assert opened.run("return document.getElementById('fig-matrix-1-mean').hidden")
    opened.click("[data-group='1']")
    assert "fedavg" in opened.traces("accuracy-after")
    assert not opened.run("return document.getElementById('fig-matrix-1-mean').hidden")


def test_clients_are_switched_on_and_off(opened):
    opened.show("accuracy-after")
    assert not [name for name in opened.traces("accuracy-after") if "client" in name]
    opened.click("[data-client='2']")
    assert "fedweit, client 2" in opened.traces("accuracy-after")
    opened.show("matrix-0-2")
    opened.show("helping-alpha-0-2")
    opened.click("[data-client='mean']")
    opened.click("[data-client='2']")
    assert opened.traces("accuracy-after") == []
    words = opened.run("return document.querySelector('#matrix .empty').textContent")
    assert words == "Nothing in this section is selected."


def test_switches_work_by_keyboard(opened):
    from selenium.webdriver import ActionChains, Keys

    opened.show("accuracy-after")
    opened.run("document.querySelector(\"[data-group='1']\").focus()")
    ActionChains(opened.driver).send_keys(Keys.SPACE).perform()
    assert "fedavg" not in opened.traces("accuracy-after")
    ActionChains(opened.driver).send_keys(Keys.TAB).perform()
    assert opened.run("return document.activeElement.dataset.group") == "2"
    opened.run("document.querySelector('#fig-accuracy-after summary').focus()")
    ActionChains(opened.driver).send_keys(Keys.ENTER).perform()
    table = opened.until(lambda: opened.run("return document.querySelector('#fig-accuracy-after table')?.innerText"))
    assert "stl, after task 1" in table


def test_light_and_dark(opened, tmp_path):
    paper = "return getComputedStyle(document.body).backgroundColor"
    opened.show("accuracy-after")
    light = opened.run(paper)
    first = "return document.querySelector('#fig-accuracy-after .plot').data.at(-1).line.color"
    one = opened.run(first)
    opened.theme("dark")
    dark = opened.until(lambda: (found := opened.run(paper)) != light and found)
    assert opened.run(first) != one
    assert opened.run("return document.getElementById('theme').textContent") == "theme: auto"
    opened.click("#theme")
    assert opened.run(paper) == light
    opened.click("#theme")
    assert opened.run(paper) == dark
    assert len(opened.picture(tmp_path / "dark.png")) > 20_000


@pytest.mark.parametrize("width", [320, 390, 820])
def test_a_phone_scrolls_one_way_only(opened, width):
    opened.size(width, 800)
    for name in ("accuracy-after", "matrix-0-mean", "helping-shares-0", "traffic-total"):
        opened.show(name)
    assert opened.run("return document.documentElement.scrollWidth") <= width
    plot = opened.run("return document.querySelector('#fig-accuracy-after .main-svg').getBoundingClientRect().width")
    assert plot <= width


def test_print_is_light_and_has_all_figures(opened, tmp_path):
    opened.theme("dark")
    opened.run("window.dispatchEvent(new Event('beforeprint'))")
    shown = "return [...document.querySelectorAll('figure:not([hidden]) .plot')].every((plot) => plot.data)"
    opened.until(lambda: opened.run(shown))
    assert opened.run("return document.documentElement.dataset.theme") == "light"
    opened.run("window.dispatchEvent(new Event('afterprint'))")
    assert opened.run("return document.documentElement.dataset.theme") == "dark"
    blob = base64.b64decode(opened.devtools("Page.printToPDF")["data"])
    assert blob.startswith(b"%PDF")
    assert opened.complaints() == []


def test_every_control_has_a_name_and_every_figure_words(opened):
    tree = opened.devtools("Accessibility.getFullAXTree")["nodes"]
    roles = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]]
    for role, name in roles:
        if role in ("button", "image", "img", "group", "navigation", "link"):
            assert name or role == "group", (role, name)
    pictures = [name for role, name in roles if role in ("image", "img")]
    assert any("from sender" in name for name in pictures)
    assert next(name for role, name in roles if role == "heading")


def test_names_from_files_run_nothing(browser, finished, tmp_path):
    evil = "<img src=x onerror=document.title='bad'><script>document.title='bad'</script>"
    folder = copy(finished, tmp_path / "run")
    plan = (folder / "plan.toml").read_text()
    (folder / "plan.toml").write_text(plan.replace('name = "fedweit"', f"name = {json.dumps(evil)}"))
    file = tmp_path / "page.html"
    file.write_text(page_of(folder))
    browser.size(1280, 900)
    browser.open(file.as_uri())
    browser.show("accuracy-after")
    browser.click("[data-client='1']")
    browser.show("matrix-0-1")
    assert browser.run("return document.title").startswith("<img")
    assert browser.run("return document.querySelectorAll('img, main script').length") == 0
    assert "<img src=x" in browser.run("return document.querySelector('h1').textContent")
    assert browser.complaints() == []


def test_the_live_page_follows_a_real_run(browser, command, plan_file, tmp_path):
    folder = tmp_path / "run"
    words = ("run", plan_file, "rounds_per_task=30", "scenario.train=200")
    browser.size(1280, 900)
    with serving(folder) as server:
        browser.requests()
        browser.complaints()
        browser.open(server.url)
        said = "return document.getElementById('status').textContent"
        browser.until(lambda: "does not exist yet" in browser.run(said))
        browser.run("window.mark = 'never loaded again'")
        running = command.start(*words, "--out", folder, "--workers", "1", "--save-every", "0", save_always=True)
        browser.until(lambda: browser.run("return document.getElementById('fig-adaptation-rounds')") is not None, 60)
        running.send(signal.SIGSTOP)  # a fast machine would be at its end before the page is looked at
        browser.show("adaptation-rounds")
        points = "return (document.querySelector('#fig-adaptation-rounds .plot').data.at(-1)?.y.length || 0)"
        few = browser.run(points)
        running.send(signal.SIGCONT)
        browser.until(lambda: browser.run(points) > few)
        running.send(signal.SIGSTOP)
        assert "left" in browser.run(said)
        assert browser.run("return document.querySelector('progress').value") > 0
        browser.click("[data-client='1']")
        browser.picture(tmp_path / "live.png")
        running.send(signal.SIGCONT)
        assert running.wait().code == 0
        browser.until(lambda: "The run is finished" in browser.run(said))
        assert browser.run("return window.mark") == "never loaded again"
        pressed = "return document.querySelector(\"[data-client='1']\").getAttribute('aria-pressed')"
        assert browser.run(pressed) == "true"  # what was switched on stays on
        browser.show("accuracy-after")
        steps = browser.run("return document.querySelector('#fig-accuracy-after .plot').data.at(-1).y.length")
        assert steps == TINY["tasks"]
        assert browser.complaints() == []
        assert {url.split("?")[0] for url in browser.requests()} == {server.url, f"{server.url}updates"}
    browser.until(lambda: "has stopped" in browser.run(said))
