"""The page of a run as a browser shows it, from a file, without a network."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browsers import browser as browser
from browsers import opened

from .written import page_of, usual, write_checkpoint, write_run, write_starts


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """A run with all that a page can show; twice as long as a curve has points."""
    folder = write_run(
        tmp_path_factory.mktemp("page") / "run",
        settings={"steps": 1000},
        steps=1000,
        metrics=lambda step: (
            usual(step)
            | ({"eval_loss": 3 + 1 / step} if step % 100 == 0 else {})
            | {"z_loss": 1e-4, "skipped": float(step == 30)}
        ),
    )
    write_starts(folder, {"first_step": 1}, {"first_step": 401, "repeated_steps": 5})
    for name in ("800", "400", "100.damaged"):
        write_checkpoint(folder, name)
    file = folder / "report.html"
    file.write_text(page_of(folder), encoding="utf-8")
    return file


@pytest.fixture
def shown(browser: Any, page: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page at a width and in a colour scheme; every message and request is an error."""
    width, scheme = getattr(request, "param", (1200, "light"))
    with opened(browser, page, width, scheme) as tab:
        yield tab


LOOKS = [(400, "light"), (400, "dark"), (1600, "light"), (1600, "dark")]


@pytest.mark.parametrize("shown", LOOKS, indirect=True, ids=lambda look: f"{look[0]}-{look[1]}")
def test_headings_and_curves_have_a_size_and_nothing_is_wider_than_the_window(shown: Any):
    assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    headings = shown.eval_on_selector_all(
        "h1, h2", "all => all.map(h => [h.textContent, h.offsetWidth * h.offsetHeight])"
    )
    assert [text for text, _ in headings][:3] == ["a run", "Warnings", "Curves"]
    assert all(size > 0 for _, size in headings)
    sizes = shown.eval_on_selector_all(
        "#curves > .charts .curve path.line",
        "all => all.map(p => [p.getBBox().width, p.getBBox().height, p.getTotalLength()])",
    )
    assert len(sizes) == 6  # of the loss, of the evaluation's, and of four others
    assert all(width > 200 and length > 200 for width, _, length in sizes)
    assert sizes[0][1] > 100  # the loss falls
    # Wide tables and pictures scroll inside.
    outside = shown.eval_on_selector_all(
        "main *:not(.scroll *)",
        "all => all.filter(e => e.getBoundingClientRect().right > innerWidth + 1).length",
    )
    assert outside == 0


@pytest.mark.parametrize("shown", LOOKS[::3], indirect=True, ids=["light", "dark"])
def test_a_screenshot_shows_curves_in_the_colours_of_its_scheme(shown: Any, tmp_path: Path):
    file = tmp_path / "page.png"
    shown.screenshot(path=str(file), full_page=True)
    import matplotlib.image

    pixels = np.round(255 * matplotlib.image.imread(file)[..., :3]).astype(int)
    is_dark = shown.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    ground = (15, 19, 24) if is_dark else (246, 247, 249)
    curve = (111, 160, 255) if is_dark else (47, 111, 222)
    share = np.all(pixels == ground, axis=-1).mean()
    assert 0.05 < share < 0.8
    assert np.all(pixels == curve, axis=-1).sum() > 500


def test_a_pointer_on_a_curve_shows_its_value_in_all_of_them(shown: Any):
    loss = shown.locator(".curve").first
    before = shown.locator(".readout").first.inner_text()
    assert before.startswith("step 999 loss 2.004 (")
    box = loss.bounding_box()
    # Half of the way from the first step to the last, between the margins.
    middle = box["x"] + 54 + (box["width"] - 54 - 14) / 2
    shown.mouse.move(middle, box["y"] + 100)
    said = shown.locator(".readout").all_inner_texts()
    assert said[0].startswith("step 501 loss 2.008 (")
    assert " eval_loss 3.002" in said[0]
    assert said[1].startswith("step 501 ")
    assert said[1].endswith(" s a step")  # which is the throughput in other words
    assert shown.locator(".curve line.cursor").count() == 5
    shown.mouse.move(1, 1)
    assert shown.locator(".readout").first.inner_text() == before


def test_keys_move_along_a_curve(shown: Any):
    shown.locator(".curve").first.focus()
    shown.keyboard.press("Home")
    readout = shown.locator(".readout").first
    assert readout.inner_text().startswith("step 1 loss 5 (4 to 6)")
    shown.keyboard.press("ArrowRight")
    assert readout.inner_text().startswith("step 3 ")
    shown.keyboard.press("End")
    assert readout.inner_text().startswith("step 999 ")


def test_a_logarithmic_scale_and_a_part_of_the_steps(shown: Any):
    figure = shown.locator(".chart").first
    line = figure.locator("path.line").first
    linear = line.get_attribute("d")
    figure.locator("button.log").click()
    assert figure.locator("button.log").get_attribute("aria-pressed") == "true"
    assert line.get_attribute("d") != linear
    figure.locator("button.log").click()
    assert line.get_attribute("d") == linear

    box = figure.locator(".curve").bounding_box()
    shown.mouse.move(box["x"] + 200, box["y"] + 50)
    shown.mouse.down()
    shown.mouse.move(box["x"] + 400, box["y"] + 50)
    shown.mouse.up()
    assert line.get_attribute("d") != linear
    every = shown.locator("#all")
    assert every.is_visible()
    every.click()
    assert line.get_attribute("d") == linear
    assert not every.is_visible()


def test_more_curves_are_drawn_when_they_are_opened(shown: Any):
    shown.locator(".more-curves summary").click()
    shown.wait_for_selector(".more-curves .curve path.line", state="attached")
    assert shown.locator(".more-curves .curve path.line").count() == 3
    assert shown.locator(".curve .restart").count() >= 8
    assert shown.locator(".curve text.bad").count() >= 8


def test_a_first_step_that_compiles_does_not_spoil_the_axis_of_a_short_run(
    browser: Any, tmp_path: Path
):
    file = tmp_path / "report.html"
    file.write_text(page_of(write_run(tmp_path / "run", steps=6)), encoding="utf-8")
    with browser.new_context(viewport={"width": 420, "height": 900}, offline=True) as context:
        tab = context.new_page()
        tab.goto(file.as_uri())
        tab.locator(".more-curves summary").click()
        figure = tab.locator(".chart", has_text="Step time")
        figure.locator(".beyond").wait_for()
        assert figure.locator(".beyond").text_content() == "up to 30, beyond the scale"
        # Half a second is in the middle of the axis, not at its bottom.
        heights = figure.locator("path.line").get_attribute("d").split("L")[1:]
        assert all(20 < float(point.split()[1]) < 120 for point in heights)
