"""The page in a real browser: it loads, predicts, shows a refusal, rings after a shift, and is readable when narrow."""

import dataclasses
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import afield
from afield.model.hidden import draw_examples
from afield.serve.engine import Arrays, Engine, TensorSpec
from afield.serve.explain import explainer
from afield.serve.models import Source
from afield.serve.open_torch import open_sngp
from tests.serve.conftest import Client, fitted, running
from tests.serve.test_service import wait_for

pytestmark = pytest.mark.slow
LABELS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    model = fitted()
    x = torch.randn(80, 2, generator=torch.Generator().manual_seed(3))
    kept = draw_examples(model, [(x, torch.arange(80) % 3)], 60)
    explain = explainer(model, kept, lambda arrays: torch.from_numpy(arrays["input"]), labels=LABELS)
    engine = dataclasses.replace(open_sngp(model, labels=LABELS), explain=explain)
    with running([Source("m", lambda path: engine)]) as client:
        yield client


@pytest.fixture(scope="module")
def browser(client: Client) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium", reason="needs pip install selenium")
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    assert selenium
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1200,1000",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        driver.get(f"http://127.0.0.1:{client.port}/")
        yield driver
    finally:
        driver.quit()


def text(browser: Any, id: str) -> str:
    return browser.find_element("id", id).text


def try_rows(browser: Any, rows: str) -> str:
    browser.find_element("id", "input").clear()
    browser.find_element("id", "input").send_keys(rows)
    before = text(browser, "answer")
    browser.find_element("css selector", "#try button").click()
    wait_for(lambda: text(browser, "answer") not in ("", before), 30)
    return text(browser, "answer")


def keep_screenshot(browser: Any, name: str, folder: Path) -> None:
    browser.save_screenshot(str(Path(os.environ.get("AFIELD_SCREENSHOTS", folder)) / f"{name}.png"))


def test_the_page_in_a_browser(browser: Any, client: Client, tmp_path: Path):
    wait_for(lambda: "refuses at most" in text(browser, "about"))
    answer = try_rows(browser, "0.1, 0.2")
    assert any(label in answer for label in LABELS)
    assert "p-value" in answer
    wait_for(lambda: len(browser.find_elements("css selector", "#answer .nearest li")) == 5)
    assert "ringing" not in browser.find_element("id", "alarm").get_attribute("class")
    assert "I don't know" in try_rows(browser, "70, -90")
    wait_for(lambda: "Features that make it far" in text(browser, "answer"))
    assert browser.find_elements("css selector", "#answer td.no")
    keep_screenshot(browser, "why", tmp_path)
    assert "Rows are numbers" in try_rows(browser, "a, b")
    assert "Row 1 has 3 numbers, expected 2" in try_rows(browser, "1, 2, 3")
    wait_for(lambda: "refused" in text(browser, "recent"))
    first = "return document.querySelectorAll('#recent tr')[1].className"
    assert "refused" in browser.execute_script(first)  # refused ones come first
    table = tmp_path / "rows.csv"
    table.write_text("a,b\n0.5,0.5\n-0.3,0.1\n")
    browser.find_element("id", "file").send_keys(str(table))
    wait_for(lambda: len(browser.find_elements("css selector", "#answer article")) == 2)
    keep_screenshot(browser, "light", tmp_path)

    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    labels = next(o["data"] for o in client.infer(x, id="known")[1]["outputs"] if o["name"] == "label")
    wait_for(lambda: client("POST", "/v2/models/m/labels", {"id": "known", "labels": labels})[0] == 200)
    client.infer(x + 9)
    wait_for(lambda: "the alarm rang at row" in text(browser, "alarm"))
    wait_for(lambda: "can be promised any more" in text(browser, "reliability-text"))
    assert browser.find_elements("css selector", "#curve .limit")
    wait_for(lambda: browser.find_elements("css selector", "#reliability circle"))
    keep_screenshot(browser, "alarm", tmp_path)

    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": 380, "height": 1900, "deviceScaleFactor": 1, "mobile": True})  # fmt: skip
    wait_for(lambda: browser.execute_script("return document.documentElement.scrollWidth") <= 380)
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 27)"
    keep_screenshot(browser, "narrow-dark", tmp_path)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_the_keyboard_is_enough(browser: Any, client: Client):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser.get(f"http://127.0.0.1:{client.port}/")
    wait_for(lambda: "refuses at most" in text(browser, "about"))
    seen = []
    for _ in range(5):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        seen.append(browser.switch_to.active_element.get_attribute("id") or browser.switch_to.active_element.tag_name)
    assert seen == ["a", "model", "input", "button", "file"]
    browser.find_element("id", "input").send_keys("0.3, 0.3", Keys.CONTROL, Keys.ENTER)
    wait_for(lambda: text(browser, "answer"))
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll('input, select, textarea, svg')].filter("
        "e => !(e.labels && e.labels.length) && !e.getAttribute('aria-labelledby')).map(e => e.id)"
    )
    assert unnamed == []


def png(red: int, green: int, blue: int, size: int = 12) -> bytes:
    """A picture of one colour."""
    rows = (b"\0" + bytes((red, green, blue)) * size) * size

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return len(content).to_bytes(4, "big") + kind + content + check.to_bytes(4, "big")

    head = size.to_bytes(4, "big") * 2 + bytes((8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def on_images() -> Engine:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    model = afield.attach(net, num_random_features=32)
    x, y = torch.rand(90, 3, 8, 8), torch.arange(90) % 3
    afield.fit_posterior(model, [(x, y)])
    afield.calibrate(model, [(torch.rand(300, 3, 8, 8), torch.arange(300) % 3)], per_class=True)
    kept = draw_examples(model, [(x, y)], 10)
    explain = explainer(model, kept, lambda arrays: torch.from_numpy(arrays["input"]), labels=LABELS)
    return dataclasses.replace(open_sngp(model.eval(), labels=LABELS, shape=(3, 8, 8)), explain=explain)


def on_texts() -> Engine:
    """By their length and their number of words."""
    rows = open_sngp(fitted(), labels=LABELS)

    def run(arrays: Arrays) -> Arrays:
        counts = np.array([[len(text) / 10 - 1, text.count(" ")] for text in arrays["text"]], dtype=np.float32)
        return rows.run({"input": counts})

    return dataclasses.replace(rows, inputs=(TensorSpec("text", "BYTES", (-1,)),), run=run, identity="texts")


def on_tables() -> Engine:
    rows = open_sngp(fitted())
    return dataclasses.replace(
        rows, identity="table", features=("size", "colour"), categories={1: ("red", "light blue")}
    )


def drop(browser: Any, name: str, kind: str, content: bytes) -> None:
    browser.execute_script(
        "const data = new DataTransfer();"
        "data.items.add(new File([new Uint8Array(arguments[2])], arguments[0], {type: arguments[1]}));"
        "document.getElementById('try').dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true}));",
        *(name, kind, list(content)),
    )


def choose(browser: Any, name: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(browser.find_element("id", "model")).select_by_value(name)


def test_images_texts_and_tables_are_tried_by_dropping_them(browser: Any, tmp_path: Path):
    engines = {"images": on_images(), "texts": on_texts(), "tables": on_tables()}
    sources = [Source(name, lambda path, engine=engine: engine) for name, engine in engines.items()]
    with running(sources) as client:
        browser.get(f"http://127.0.0.1:{client.port}/")
        wait_for(lambda: "shape 3" in text(browser, "input-help"))
        drop(browser, "red.png", "image/png", png(255, 0, 0))
        wait_for(lambda: browser.find_elements("css selector", "#answer .nearest canvas"))
        wait_for(lambda: "3 x 8 x 8, mean 0.333" in text(browser, "recent"))  # scaled to the shape and to 0 to 1
        keep_screenshot(browser, "image", tmp_path)
        for _ in range(3):  # one class drifts, and is named
            rows = torch.full((30, 3, 8, 8), 5.0)
            client.infer(rows, "images")
        wait_for(lambda: "the alarm" in text(browser, "alarm"))
        browser.execute_script("document.getElementById('by-class').open = true")
        wait_for(lambda: any(label in text(browser, "classes") for label in LABELS))
        keep_screenshot(browser, "by-class", tmp_path)

        choose(browser, "texts")
        wait_for(lambda: text(browser, "input-label").startswith("Texts"))
        wait_for(lambda: text(browser, "alarm") == "")
        drop(browser, "some.txt", "text/plain", b"where is it\nhere\n")
        wait_for(lambda: len(browser.find_elements("css selector", "#answer article")) == 2)
        wait_for(lambda: "where is it" in text(browser, "recent"))

        choose(browser, "tables")
        wait_for(lambda: "colour (red, light blue)" in text(browser, "input-help"))
        drop(browser, "t.csv", "text/csv", b"colour,size\nlight blue,0.5\npink,0.25\n")
        wait_for(lambda: "0.5, 1" in text(browser, "recent"))
        assert "0.25, -1" in text(browser, "recent")  # a colour that nobody knows
        drop(browser, "t.csv", "text/csv", b"size\n1\n")
        wait_for(lambda: "The column colour is missing" in text(browser, "answer"))


def test_a_model_that_is_loaded_anew_is_described_anew(browser: Any):
    engines = [dataclasses.replace(open_sngp(fitted()), identity="first" * 3)]
    with running([Source("m", lambda path: engines[-1])]) as client:
        browser.get(f"http://127.0.0.1:{client.port}/")
        wait_for(lambda: "version firstfirstfi," in text(browser, "about"))
        engines.append(dataclasses.replace(open_sngp(fitted(1), labels=LABELS), identity="second" * 3))
        models = client.service.models
        before = models.current["m"]
        version = models._open(models.sources[0], None, Path(), before)
        models._publish("m", before, {version.name: version})
        wait_for(lambda: "version secondsecond," in text(browser, "about"))
        assert any(label in try_rows(browser, "0.1, 0.2") for label in LABELS)
