"""The interactive page of schedules: what its script computes, and how a browser shows it."""

from pathlib import Path
from typing import Any

import pytest

from browsers import browser as browser
from jaxpipe.schedules import Costs, Schedule, build, makespan, parse, peak_activations, simulate
from jaxpipe.schedules.io import to_html
from jaxpipe.schedules.lock_step import Ticks, simulate_ticks, to_lock_step

OPENED = Costs(forward=2, input=3, weight=1, transfer=0.5)
ZBV = build("zbv", ranks=4, microbatches=8)
SLICED = build("seq1f1b", ranks=2, microbatches=3, slices=2)
DUALPIPE = build("dualpipe", ranks=4, microbatches=8)
UNEVEN = parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
CASES: dict[str, tuple[Schedule | Ticks, Costs]] = {
    "zbv": (ZBV, OPENED),
    "dualpipe": (DUALPIPE, OPENED),
    "halves of pairs": (DUALPIPE, Costs(2, 3, 1, atomic_pairs=False, pair_factor=0.5)),
    "slices": (SLICED, OPENED),
    "costs per stage": (UNEVEN, Costs((3, 1), 2, (1, 5), transfer=1)),
    "ticks": (to_lock_step(ZBV, OPENED), OPENED),
}


def show(browser: Any, tmp_path: Path, page: str, width: int = 1200, scheme: str = "light") -> Any:
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    tab, said = context.new_page(), []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda asked: said.append(asked.url))
    tab.goto(file.as_uri())
    assert said == [file.as_uri()]
    return tab


def times_in(tab: Any, name: str) -> dict[str, list[float]]:
    """The start and the end of every step, by rank and step."""
    return tab.evaluate(
        "name => { const s = data.schedules.find((s) => s.name === name);"
        " return Object.fromEntries(s.steps.map((x, i) => [`${x.rank} ${x.text}`, s.times[i]])); }",
        name,
    )


def times_of(schedule: Schedule | Ticks, costs: Costs) -> dict[str, list[float]]:
    timeline = (
        simulate_ticks(schedule, costs)
        if isinstance(schedule, Ticks)
        else simulate(schedule, costs)
    )
    return {
        f"{rank} {timed.step}": [timed.start, timed.end]
        for rank, row in enumerate(timeline.rows)
        for timed in row
    }


@pytest.mark.parametrize("name", CASES)
def test_the_script_computes_the_times_of_the_simulation(name: str, browser: Any, tmp_path: Path):
    schedule, costs = CASES[name]
    tab = show(browser, tmp_path, to_html({name: schedule}, costs))
    computed, wanted = times_in(tab, name), times_of(schedule, costs)
    assert set(computed) == set(wanted)
    for step, times in wanted.items():
        assert computed[step] == pytest.approx(times), step
    order = schedule.schedule if isinstance(schedule, Ticks) else schedule
    assert tab.evaluate("data.schedules[0].figures.peaks") == list(peak_activations(order))
    tab.context.close()


def test_a_slider_moves_the_schedule_and_reset_moves_it_back(browser: Any, tmp_path: Path):
    tab = show(browser, tmp_path, to_html({"zbv": ZBV}, OPENED))
    tab.locator("#W").fill("3")
    tab.locator("#T").fill("0")
    moved = Costs(forward=2, input=3, weight=3)
    assert times_in(tab, "zbv") == times_of(ZBV, moved)
    assert f"Makespan {makespan(simulate(ZBV, moved)):g}" in tab.locator(".figures").inner_text()
    tab.get_by_role("button", name="Reset").click()
    assert times_in(tab, "zbv") == times_of(ZBV, OPENED)
    tab.context.close()


def test_pointer_and_keys_choose_an_action(browser: Any, tmp_path: Path):
    tab = show(
        browser, tmp_path, to_html({"1f1b": build("1f1b", ranks=2, microbatches=2)}, Costs())
    )
    canvas = tab.locator("canvas")
    canvas.hover(position={"x": 5, "y": 10})
    assert "rank 0: 0F0 (forward F, stage 0, microbatch 0), from 0 to 1" in readout(tab)
    canvas.press("ArrowRight")
    assert "0F1" in readout(tab) and "stores 2 microbatches" in readout(tab)
    canvas.press("ArrowDown")
    assert "rank 1: 1F0" in readout(tab)
    canvas.press("Escape")
    assert readout(tab) == "Point at an action."
    tab.context.close()


def readout(tab: Any) -> str:
    return tab.locator(".readout").inner_text()


@pytest.mark.parametrize(("width", "scheme"), [(420, "light"), (1400, "dark")])
def test_nothing_is_wider_than_the_window(width: int, scheme: str, browser: Any, tmp_path: Path):
    schedules = {"zbv": ZBV, "1f1b": build("1f1b", ranks=4, microbatches=8)}
    tab = show(browser, tmp_path, to_html(schedules, Costs()), width, scheme)
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert tab.locator("canvas").count() == 2
    tab.context.close()


def test_a_schedule_with_half_the_stages_has_stages_of_twice_the_work(browser: Any, tmp_path: Path):
    other = build("1f1b", ranks=4, microbatches=8)
    tab = show(browser, tmp_path, to_html({"zbv": ZBV, "1f1b": other}, Costs()))
    assert "its stages have 2 times the work of zbv's" in tab.locator("main").inner_text()
    assert times_in(tab, "1f1b") == times_of(other, Costs(2, 2, 2))
    assert tab.evaluate("data.schedules[1].figures.peaks") == [8, 6, 4, 2]
    tab.context.close()


def test_names_cannot_add_markup():
    page = to_html({"</script><b>": ZBV}, Costs())
    assert "</script><b>" not in page
    assert page.count("</script>") == 2


def test_costs_must_suit_every_schedule():
    with pytest.raises(ValueError, match="`weight` has 2 entries for 8 stages"):
        to_html({"zbv": ZBV}, Costs(weight=(1, 2)))
