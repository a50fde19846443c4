"""The built site in headless Chromium, opened from a folder: at 1400 and 380 pixels, light and dark.

Nothing is wider than the page or lies over its neighbour, text stands out from its ground, wide tables and code scroll,
code blocks copy, search finds, and no request leaves. AFIELD_SCREENSHOTS=FOLDER keeps a picture of every page.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[1]
PAGES = (
    *("index", "start", "faq", "coming-from", "network", "decisions", "outputs", "serving", "results", "settings"),
    *("tutorials/resnet", "tutorials/audit", "reference/model", "reference/cli", "how-it-works", "guarantees", "speed"),
)
VIEWS = [(1400, "light"), (1400, "dark"), (380, "light"), (380, "dark")]
FIT = """
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const over = [];
for (const parent of document.querySelectorAll(".md-content__inner, .md-typeset details, .md-typeset li")) {
    const boxes = [...parent.children].filter(each => {
        const style = getComputedStyle(each);
        return each.offsetHeight && style.position === "static" && style.float === "none" && style.display !== "inline";
    });
    boxes.slice(1).forEach((each, k) => {
        const gap = each.getBoundingClientRect().top - boxes[k].getBoundingClientRect().bottom;
        if (gap < -1 && each.tagName !== "A") over.push(each.outerHTML.slice(0, 120));
    });
}
const cut = [...document.querySelectorAll(".md-typeset table:not([class]), .md-typeset pre > code, .md-typeset img")]
    .filter(each => {
        const scrolls = [...function* () { for (let e = each; e; e = e.parentElement) yield e; }()]
            .some(e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX));
        return each.getBoundingClientRect().right > window.innerWidth + 1 && !scrolls;
    }).map(each => each.outerHTML.slice(0, 120));
return {wide, over, cut};
"""
CONTRAST = """
function rgb(text) { const n = text.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n.slice(0, 3), 1]; }
function light([r, g, b]) {
    const part = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
}
function over(a, b) { return [0, 1, 2].map(k => a[3] * a[k] + (1 - a[3]) * b[k]).concat(1); }
function ground(each) {
    const layers = [];
    for (let e = each; e; e = e.parentElement) layers.push(rgb(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
}
const poor = [];
const texts = document.querySelectorAll(".md-typeset :is(p, td, th, li, h1, h2, h3, code, pre span)");
for (const each of [...texts].filter(e => e.offsetHeight && [...e.childNodes].some(n => n.nodeType === 3
        && n.textContent.trim())).slice(0, 4000)) {
    const below = ground(each), above = over(rgb(getComputedStyle(each).color), below);
    const [a, b] = [light(above), light(below)].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 3) poor.push([each.className, each.textContent.slice(0, 40), (a + .05) / (b + .05)]);
}
return poor.slice(0, 10);
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason='needs pip install "afield[docs]"')
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("selenium", reason="needs pip install selenium")
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def show(browser: Any, site: Path, page: str, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get((site / f"{page}.html").as_uri())
    wait_for(lambda: browser.execute_script("return document.readyState") == "complete")


def wait_for(happened: Callable[[], Any], seconds: float = 10) -> Any:
    end = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
    return found


def keep_screenshot(browser: Any, name: str) -> None:
    if folder := os.environ.get("AFIELD_SCREENSHOTS"):
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_and_can_be_read(page: str, width: int, scheme: str, site: Path, browser: Any):
    show(browser, site, page, width, scheme)
    keep_screenshot(browser, f"{page.replace('/', '-')}-{width}-{scheme}")
    found = browser.execute_script(FIT)
    assert found == {"wide": 0, "over": [], "cut": []}
    assert browser.execute_script(CONTRAST) == []
    shown = browser.execute_script("return document.body.getAttribute('data-md-color-scheme')")
    assert shown == {"light": "default", "dark": "slate"}[scheme]


def test_no_request_leaves(site: Path, browser: Any):
    """Not even to ask GitHub for the number of stars, as the theme would, a moment after the page is there."""
    browser.get_log("performance")
    for page in PAGES[:4]:
        show(browser, site, page, 1400, "light")
        time.sleep(2)
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert len(asked) > 8
    assert not [address for address in asked if not address.startswith(("file:", "data:", "blob:"))]


def test_a_wide_table_scrolls(site: Path, browser: Any):
    show(browser, site, "results", 380, "light")
    moved = browser.execute_script(
        "const all = [...document.querySelectorAll('.md-typeset__scrollwrap')];"
        "return all.filter(e => e.scrollWidth > e.clientWidth).map(e => { e.scrollLeft = 50; return e.scrollLeft; })"
    )
    assert len(moved) > 5
    assert set(moved) == {50}


@pytest.mark.parametrize("width", [1400, 380])
@pytest.mark.parametrize("page", ["start", "tutorials/resnet", "reference/model"])
def test_every_code_block_copies(page: str, width: int, site: Path, browser: Any):
    """The button of each block, then Ctrl+V into a text field."""
    from selenium.webdriver.common.keys import Keys

    show(browser, site, page, width, "light")
    browser.execute_script(
        "const field = document.createElement('textarea'); field.id = 'pasted'; document.body.append(field);"
    )
    blocks = browser.find_elements("css selector", ".md-typeset pre:has(> code)")
    assert len(blocks) >= 4
    field = browser.find_element("id", "pasted")
    for block in blocks:
        buttons = block.find_elements("css selector", "[data-clipboard-target]") or block.parent.find_elements(
            "css selector", f"[data-clipboard-target='#{block.get_attribute('id')} > code']"
        )
        assert len(buttons) == 1, block.get_attribute("outerHTML")[:200]
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", block)
        buttons[0].click()
        field.clear()
        field.send_keys(Keys.CONTROL, "v")
        wanted = browser.execute_script("return arguments[0].querySelector('code').innerText", block)
        assert field.get_property("value").strip() == wanted.strip()


def test_search_finds_without_a_server(site: Path, browser: Any):
    show(browser, site, "index", 1400, "light")
    wait_for(lambda: browser.find_elements("css selector", ".md-search__input"))
    browser.find_element("css selector", ".md-search__input").send_keys("false discovery rate")
    found = wait_for(lambda: browser.find_elements("css selector", ".md-search-result__link"), 30)
    assert any("decisions" in each.get_attribute("href") for each in found)
