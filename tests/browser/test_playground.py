"""The playground in headless Chromium: it draws, predicts what torch predicts, and asks nobody for anything."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import conformallayers as cl
from conformallayers.lab.playground.page import NETWORK, write_playground
from oracle import relative_error

pytest.importorskip("selenium", reason="selenium is not installed: pip install '.[browser]'")

from PIL import Image, ImageDraw
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = CHROMIUM is None or DRIVER is None
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(MISSING, reason="chromium and chromedriver are not installed"),
]

Driver = Any
HOSTILE = "</script><img src=x onerror=alert(1)>&\u2028"
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update --disable-dev-shm-usage"""


@pytest.fixture(scope="module")
def folds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return networks for digits of 28×28 and 8×8 pixels, and one for grey and one for colour images."""
    folder = tmp_path_factory.mktemp("folds")
    torch.manual_seed(0)
    made = [folder / f"{name}.safetensors" for name in (NETWORK, "digits-micro")]
    for path in made:
        cl.save(cl.zoo.load(path.stem), path)
    for name, shape in (("mnist", (1, 28, 28)), ("colour", (3, 12, 10))):
        features = cl.ConformalLayers(cl.Conv2d(shape[0], 4, 3, stride=2), cl.ReSPro())
        sides = [(side - 3) // 2 + 1 for side in shape[1:]]
        head = torch.nn.Linear(4 * math.prod(sides), 3)
        model = torch.nn.Sequential(features, torch.nn.Flatten(), head)
        made.append(folder / f"{name}.safetensors")
        about = {"dataset": name, "white": 2.0}
        folded = cl.fold(model, shape, strategy="conv")
        cl.save(folded, made[-1], labels=[HOSTILE, "b", "c"], about=about)
    return made


@pytest.fixture(scope="module")
def page(folds: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_playground(tmp_path_factory.mktemp("page") / "playground.html", folds).as_uri()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    options = webdriver.ChromeOptions()
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.binary_location = str(CHROMIUM)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(str(DRIVER)))
    yield browser
    browser.quit()


@pytest.fixture
def visit(driver: Driver, page: str) -> Iterator[Callable[..., Driver]]:
    """Open the page at a width, light or dark; afterwards look at its console and its requests."""
    driver.get_log("performance")

    def open_page(width: int = 1000, scheme: str = "light") -> Driver:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        media.append({"name": "prefers-reduced-motion", "value": "reduce"})  # no smooth scrolling
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        driver.get(page)
        return driver

    yield open_page
    assert driver.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert {request["request"]["url"] for request in sent} - {"data:,"} == {page}


def text(driver: Driver, name: str) -> str:
    return str(driver.find_element(By.ID, name).text)


def read(driver: Driver, name: str) -> torch.Tensor:
    return torch.tensor(driver.execute_script(f"return playground.{name}()"), dtype=torch.float64)


def settle(driver: Driver) -> None:
    """Wait until the drawing is classified."""
    script = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
    driver.execute_async_script(script)


def assert_torch_agrees(driver: Driver, path: Path) -> None:
    folded = cl.load(path)
    x = read(driver, "input").view(1, *folded.input_shape)
    assert float(x.norm()) > 0
    with torch.no_grad():
        expected = folded(x.float())
    assert relative_error(read(driver, "scores")[None], expected) < 1e-5


def draw(driver: Driver, points: list[tuple[float, float]]) -> None:
    """Draw a line through points, from -0.5 to 0.5 of the drawing area, with the pointer."""
    ink = driver.find_element(By.ID, "ink")
    driver.execute_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", ink
    )
    side = ink.size["width"]
    places = [(round(x * side), round(y * side)) for x, y in points]
    actions = ActionChains(driver, duration=10)
    actions.move_to_element_with_offset(ink, *places[0]).click_and_hold()
    for place in places[1:]:
        actions.move_to_element_with_offset(ink, *place)
    actions.release().perform()
    settle(driver)


CIRCLE = [(0.22 * math.sin(a * math.pi / 8), -0.36 * math.cos(a * math.pi / 8)) for a in range(17)]
DIGITS = {
    "0": CIRCLE,
    "1": [(-0.1, -0.25), (0.02, -0.38), (0.02, 0.38)],
    "7": [(-0.25, -0.35), (0.25, -0.35), (-0.05, 0.4)],
}


@pytest.mark.parametrize(("digit", "width"), [("0", 1000), ("1", 1000), ("7", 360)])
def test_it_draws_and_predicts_what_torch_predicts(
    visit: Callable[..., Driver], folds: list[Path], digit: str, width: int
) -> None:
    driver = visit(width)
    driver.find_element(By.ID, "clear").click()
    settle(driver)
    assert text(driver, "verdict") == "Nothing drawn yet"
    draw(driver, DIGITS[digit])
    assert text(driver, "verdict").startswith(digit)
    assert driver.find_element(By.CSS_SELECTOR, "#scores .best .name").text == digit
    assert_torch_agrees(driver, folds[0])


@pytest.mark.parametrize("chosen", [0, 1], ids=["28x28", "8x8"])
def test_every_example_is_classified(
    visit: Callable[..., Driver], folds: list[Path], chosen: int
) -> None:
    """A network for 8×8 pixels sees it as it is in the data, one for 28×28 enlarged."""
    driver = visit()
    driver.find_elements(By.CSS_SELECTOR, "#network option")[chosen].click()
    right = 0
    for button in driver.find_elements(By.CSS_SELECTOR, "#examples button"):
        button.click()
        label = button.get_attribute("aria-label").removeprefix("Example ")
        right += text(driver, "verdict").startswith(label)
        assert_torch_agrees(driver, folds[chosen])
        steps = read(driver, "input") * 16
        assert torch.equal(steps, steps.round()) == (chosen == 1)
    assert right >= 9


def test_pictures_and_other_networks(
    visit: Callable[..., Driver], folds: list[Path], tmp_path: Path
) -> None:
    """Dark ink on bright paper becomes bright ink; labels are text, whatever they hold."""
    driver = visit()
    picture = Image.new("RGB", (300, 200), "white")
    ImageDraw.Draw(picture).line([(150, 30), (150, 170)], fill=(10, 20, 120), width=16)
    picture.save(tmp_path / "one.png")
    chooser = driver.find_element(By.ID, "file")
    chooser.send_keys(str(tmp_path / "one.png"))
    WebDriverWait(driver, 10).until(lambda d: text(d, "verdict").startswith("1"))
    assert_torch_agrees(driver, folds[0])
    options = driver.find_elements(By.CSS_SELECTOR, "#network option")
    assert len(options) == 4
    for option, path in zip(options[2:], folds[2:], strict=True):
        option.click()
        assert option.get_property("textContent") == path.stem
        assert_torch_agrees(driver, path)
        names = driver.find_elements(By.CSS_SELECTOR, "#scores .name")
        assert [name.get_property("textContent") for name in names] == [HOSTILE, "b", "c"]
    bright = read(driver, "input").view(3, 12, 10) / 2  # blue ink on white paper
    assert float(bright[:, :, 0].min()) > 0.99
    red, _, blue = (1 - bright.flatten(1).min(1).values).tolist()
    assert abs(blue / red - (255 - 120) / (255 - 10)) < 0.01
    (tmp_path / "none.png").write_text("no picture")
    chooser.send_keys(str(tmp_path / "none.png"))
    WebDriverWait(driver, 10).until(lambda d: "none.png is no picture" in text(d, "verdict"))


def test_everything_works_by_keyboard(visit: Callable[..., Driver], folds: list[Path]) -> None:
    """Tab reaches every control; arrow keys draw, choose a step and move the point."""
    driver = visit()
    ActionChains(driver).send_keys(Keys.TAB).perform()
    reached = []
    while (active := driver.switch_to.active_element).tag_name != "body":
        assert len(reached) < 50
        reached.append(active.get_attribute("id") or active.get_attribute("class"))
        style = (
            "const s = getComputedStyle(document.activeElement); return s.outlineStyle + s.stroke"
        )
        assert driver.execute_script(style) != "nonenone", reached
        ActionChains(driver).send_keys(Keys.TAB).perform()
    wanted = {
        "network",
        "ink",
        "clear",
        "file",
        "depth-trained",
        "layers",
        "measure",
        "alpha",
        "handle",
    }
    assert wanted <= set(reached)
    ink = driver.find_element(By.ID, "ink")
    ink.send_keys(Keys.DELETE)
    settle(driver)
    assert text(driver, "verdict") == "Nothing drawn yet"
    ink.send_keys(Keys.SHIFT + Keys.ARROW_UP * 9)  # Shift is held until the end of the keys
    settle(driver)
    assert text(driver, "verdict") == "Nothing drawn yet"
    ink.send_keys(Keys.ARROW_DOWN * 18)
    settle(driver)
    assert text(driver, "verdict").startswith("1")
    assert_torch_agrees(driver, folds[0])
    handle = driver.find_element(By.CSS_SELECTOR, "#plane .handle")
    before = text(driver, "respro-text")
    handle.send_keys(Keys.ARROW_LEFT * 3)
    assert text(driver, "respro-text") != before
    assert "x = (1.30, 1.10)" in text(driver, "respro-text")


def test_respro_is_that_of_the_library(visit: Callable[..., Driver]) -> None:
    driver = visit()
    x, t = torch.tensor([[1.6, 1.1]]), torch.ones(1)
    y = cl.functional.project(*cl.functional.respro(x, t, 1.5)).norm()
    assert f"distance {float(y):.3f} along the ray, height 0.000" in text(driver, "respro-text")
    handle = driver.find_element(By.CSS_SELECTOR, "#plane .handle")
    driver.execute_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", handle
    )
    ActionChains(driver, duration=20).drag_and_drop_by_offset(handle, -80, 40).perform()
    assert "x = (1.60" not in text(driver, "respro-text")
    driver.find_element(By.CSS_SELECTOR, "#steps input[value='1']").click()
    assert "Reflected in the sphere" in text(driver, "respro-text")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1000])
def test_it_fits_the_window_and_its_text_can_be_read(
    visit: Callable[..., Driver], width: int, scheme: str
) -> None:
    driver = visit(width, scheme)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    script = """
      const rgb = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
      const light = (c) => rgb(c).map((v) => v / 255)
        .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
      const ground = (e) => { const c = getComputedStyle(e).backgroundColor;
        return /, 0\\)$/.test(c) && e.parentElement ? ground(e.parentElement) : c; };
      return [...document.querySelectorAll("p, h1, h2, h3, label, legend, button, a, .name, .value, output")]
        .filter((e) => e.textContent.trim())
        .map((e) => [light(getComputedStyle(e).color), light(ground(e))])
        .map(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
    """
    assert min(driver.execute_script(script)) > 4.5
    ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 380) == (scheme == "dark")


def test_training_depth_leaves_the_deployed_kernel(visit: Callable[..., Driver]) -> None:
    """A chain of any depth beside the kernel: other weights, the same numbers on the drawn picture."""
    driver = visit()
    slider, sums = driver.find_element(By.ID, "depth-trained"), set()
    pixels = (
        "return [...document.querySelectorAll('#kernels canvas')].slice(-3).map(c => c.toDataURL())"
    )
    slider.send_keys(Keys.HOME)
    for depth in range(1, 6):
        said = text(driver, "expand-text")
        assert float(said.split("differ by ")[1].split()[0]) < 1e-12
        kernel, trained, deployed = driver.execute_script(pixels)
        sums |= {kernel, trained, deployed}
        tiles = driver.find_elements(By.CSS_SELECTOR, "#kernels .tile")
        assert len(tiles) == 4 + (depth if depth > 1 else 0)
        assert said.startswith(
            f"{(25, 79, 136, 193, 202)[depth - 1]} weights in training, 25 deployed"
        )
        slider.send_keys(Keys.ARROW_RIGHT)
    assert len(sums) <= 3
    for when, nodes in (("before", 12), ("after", 5)):
        assert len(driver.find_elements(By.CSS_SELECTOR, f"#graph-{when} .node")) == nodes


def test_depth_and_insight_are_measured_here(visit: Callable[..., Driver]) -> None:
    driver = visit()
    ready = "return playground.measured()"
    WebDriverWait(driver, 120).until(lambda d: d.execute_script(ready))
    assert len(driver.find_elements(By.CSS_SELECTOR, "#depth-chart circle")) == 18
    slider = driver.find_element(By.ID, "layers")
    slider.send_keys(Keys.END)
    said = text(driver, "depth-result")
    assert said.startswith("9 layers: ")
    assert float(said.split("folded, ")[1].split(" times")[0]) > 3
    assert float(said.split("differ by ")[1].split()[0]) < 1e-5
    shares = [term["share"] for term in driver.execute_script("return playground.terms()")]
    assert len(shares) == 4
    assert abs(sum(shares) - 1) < 1e-12
    assert min(shares) > 0.05
    assert len(driver.find_elements(By.CSS_SELECTOR, "#templates .tile.best")) == 1
