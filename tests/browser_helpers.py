"""Debian's Chromium without a window, driven by Selenium: what a person sees, and what the console says."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from skips import LOUD

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
HOW = "Debian: apt-get install chromium chromium-driver"


class Browser:
    def __init__(self, driver: Any):
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)
        self.until(lambda: self.run("return document.documentElement.dataset.ready") == "yes")

    def run(self, program: str, *arguments: Any) -> Any:
        return self.driver.execute_script(program, *arguments)

    def devtools(self, name: str, **options: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, options)

    def until(self, happened: Callable[[], Any], seconds: float = 30) -> Any:
        end = time.monotonic() + seconds
        while not (found := happened()):
            assert time.monotonic() < end, f"nothing happened within {seconds} s"
            time.sleep(0.05)
        return found

    def size(self, width: int, height: int) -> None:
        phone = width < 600
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )

    def theme(self, name: str) -> None:
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def click(self, selector: str) -> None:
        element = self.driver.find_element("css selector", selector)
        self.run("arguments[0].scrollIntoView({behavior: 'instant', block: 'center'})", element)
        element.click()

    def show(self, figure: str) -> None:
        """Scroll to a figure and wait until it is drawn."""
        self.run("document.getElementById(arguments[0]).scrollIntoView({behavior: 'instant'})", f"fig-{figure}")
        self.until(lambda: self.traces(figure) is not None)

    def traces(self, figure: str) -> list[str] | None:
        """The names of what a figure draws; None if it is not drawn."""
        found = self.run(
            "const plot = document.querySelector(`#fig-${arguments[0]} .plot`);"
            "return plot && plot.data ? plot.data.map((one) => one.name || one.type) : null",
            figure,
        )
        return None if found is None else list(found)

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Every address that the page asked for since this was last called."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return [url for url in found if not url.startswith(("data:", "blob:"))]

    def picture(self, file: Path) -> bytes:
        blob = base64.b64decode(self.devtools("Page.captureScreenshot", format="png")["data"])
        file.write_bytes(blob)
        return blob


@contextmanager
def chromium() -> Iterator[Browser]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip(f"{LOUD}the pages in a real browser: there is no Chromium here ({HOW})")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        pytest.skip(f"{LOUD}the pages in a real browser: selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(word)  # without a sandbox: in a container as root there is none to be had
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
