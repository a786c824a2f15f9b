"""report.html in a real browser: charts, hover, click, keyboard, themes, and not one error in the console."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Diagnosis, Finding, Quantity, Remedy, Severity
from gradwatch.render.report.sink import NAME, write_report

pytest.importorskip("selenium", reason="selenium is not installed")

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

LAYERS, STEPS, ONSET, BROKEN = 12, 200, 50, 150
NAN_COLOUR = (224, 0, 122)
TEXT_COLOURS = ("--text", "--muted", "--accent", "--ok", "--info", "--warning", "--critical")
CRITICAL = "return getComputedStyle(document.documentElement).getPropertyValue('--critical')"
LEAST_CONTRAST = 4.5
"""Of text, WCAG 2.2, 1.4.3, level AA."""


def _ill():
    """Return a run that vanishes, holds a NaN, and has a layer without gradient; and what is said of it."""
    run = Synthetic(layers=LAYERS, steps=STEPS, activations=2).vanishing(decades=8, onset=40).no_gradient(7)
    run.non_finite(step=BROKEN, layers=9)
    run.info = replace(run.info, name="ill")
    history = run.history()
    finding = Finding(
        code="GW101",
        kind="vanishing-gradient",
        layer="layers.0.weight",
        step=ONSET,
        severity=Severity.CRITICAL,
        message="gradients shrink by 8 decades",
        evidence=(Quantity(key="grad.l2", value=1e-9),),
    )
    history.report(finding)
    remedy = Remedy(text="use ReLU", patch={"model.activation": "relu"})
    cause = Diagnosis(
        cause="saturation", certainty=0.9, findings=(finding,), because="b", confirm="c", remedies=(remedy,)
    )
    return history, (cause,)


@pytest.fixture(scope="module")
def ill():
    return _ill()


@pytest.fixture
def opened(browser, tmp_path):
    """Return a function that writes the report of a run, opens it from its file, and waits until it is drawn."""

    def show(history, diagnoses=(), *, config_text=""):
        write_report(tmp_path / NAME, history, diagnoses, config_text=config_text)
        browser.driver.get((tmp_path / NAME).as_uri())
        browser.wait(lambda: browser.script("return document.documentElement.dataset.ready"), "the page is not drawn")
        return browser

    return show


def _over(page):
    """Return the plot of the map, scrolled into view."""
    page.script("document.getElementById('map').scrollIntoView({block: 'center'})")
    return page["#map .u-over"]


def _move(page, *, row, share, rows=LAYERS):
    """Move the mouse to the middle of a row of the map, at a share of its width, and return the step there."""
    over = _over(page)
    width, height = over.size["width"], over.size["height"]
    x, y = round((share - 0.5) * width), round(((row + 0.5) / rows - 0.5) * height)
    ActionChains(page.driver, duration=0).move_to_element_with_offset(over, x, y).perform()


def _colours(page, selector):
    """Return the colours of a canvas, of shape (pixels, 3)."""
    code = (
        "const c = document.querySelector(arguments[0]); const d = c.getContext('2d').getImageData(0, 0, c.width,"
        " c.height).data; const seen = new Set(); for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255)"
        " seen.add(`${d[i]},${d[i + 1]},${d[i + 2]}`); return [...seen];"
    )
    return {tuple(int(part) for part in colour.split(",")) for colour in page.script(code, selector)}


def test_it_opens_and_draws_every_chart_without_a_complaint(opened, ill):
    page = opened(*ill)

    assert page["h1"].text == "ill"
    assert page[".health"].text.endswith("Vanishing gradient: saturation")
    assert len(_colours(page, "#map canvas")) > 50, "a map that fades has many colours"
    for place, charts in (("#curves", 3), ("figure.profile", 1), ("#trends", 6), ("#cost-curves", 1)):
        drawn = page.all(f"{place} canvas")
        assert len(drawn) == charts
        assert all(canvas.size["width"] > 100 for canvas in drawn)
    assert "0 at every step: grad.zero_frac, grad.nonfinite." in page["#trends"].text, "charts of zeros are left out"
    assert page["#curves"].location["y"] < page["#findings"].location["y"]
    assert page.complaints() == []


def test_the_curves_mark_findings_and_link_to_them(opened, ill):
    page = opened(*ill)

    (mark,) = page.all("#marks a")
    assert mark.get_attribute("href").endswith("#vanishing-gradient")
    assert mark.text == f"▼ GW101 vanishing-gradient, step {ONSET}"
    assert page["#vanishing-gradient h5"].text == "GW101 vanishing-gradient"
    critical = tuple(bytes.fromhex(page.script(CRITICAL).strip("# ")))
    assert critical in _colours(page, "#curves canvas")


def test_a_finding_over_depth_is_drawn_layer_by_layer(opened, ill):
    page = opened(*ill)
    over = page["figure.profile .u-over"]
    page.script("arguments[0].scrollIntoView({block: 'center'})", over)

    # the axis reaches from 0.4 before the first layer to 0.4 after the last
    ActionChains(page.driver, duration=0).move_to_element_with_offset(
        over, round(((2 + 0.4) / (LAYERS - 0.2) - 0.5) * over.size["width"]), 0
    ).perform()

    told = page["figure.profile .tooltip"].get_attribute("textContent")
    norms_TL = ill[0]["grad.l2"]
    pattern = rf"layers\.2\.?\w*at step {ONSET}: (\S+?)at step {STEPS - 1}: (\S+?)range of the {ONSET} steps before: .*"
    values = [float(value) for value in re.fullmatch(pattern, told).groups()]
    assert values == pytest.approx([norms_TL[ONSET, 2], norms_TL[-1, 2]], rel=0.006)
    assert f"at step {STEPS - 1} from" in page["figure.profile figcaption"].text


def test_steps_without_backward_pass_and_findings_on_the_whole_run_are_on_the_map(opened):
    run = Synthetic(layers=3, steps=100)
    run.loss_T[60:64] = np.nan
    history = run.history()
    steps_T, values_TSL = history.param.rows()
    values_TSL[60:64] = np.nan
    broken = History(history.info)
    broken.param.fill(steps_T, values_TSL)
    broken.run.fill(*history.run.rows())
    broken.report(
        Finding(code="GW001", kind="non-finite", layer=None, step=60, severity=Severity.CRITICAL, message="m")
    )

    page = opened(broken)

    assert NAN_COLOUR in _colours(page, "#map canvas")
    page["button.show"].click()
    told = page["#readout"].text
    assert told.startswith(
        "layers.0.weight · step 60 · grad.l2 no value; the loss was NaN or Inf: the backward pass was"
    )
    assert told.endswith("critical: GW001 non-finite")
    assert "the backward pass was skipped" in page["#legend"].text


def test_a_patch_can_be_copied(opened, ill):
    page = opened(*ill)
    page.script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")

    page["button.copy"].click()

    page.wait(lambda: page["button.copy"].text == "Copied", "the button does not say so")
    assert page.script("return window.copied") == "model:\n  activation: relu"


def test_groups_of_one_rate_share_a_line(opened):
    run = Synthetic(layers=2, steps=20)
    history = History(run.info, groups=3)
    made = run.history()
    steps_T, values_TS1 = made.run.rows()
    rate = made.run.statistics.index("lr.0")
    history.param.fill(*made.param.rows())
    rates = [values_TS1[:, rate : rate + 1] * times for times in (1, 1, 2)]
    history.run.fill(steps_T, np.concatenate([values_TS1[:, :rate], *rates, values_TS1[:, rate + 1 :]], axis=1))

    page = opened(history)

    (caption,) = [c.text for c in page.all("#curves figcaption") if c.text.startswith("Learning rate")]
    assert re.sub(r"\s+", " ", caption) == "Learning rate parameter groups 0, 1 parameter group 2"


def test_hovering_shows_layer_step_and_value(opened, ill):
    page = opened(*ill)

    _move(page, row=4, share=0.755)

    note = page.wait(lambda: page.all("#map .tooltip"), "no tooltip")[0].get_attribute("textContent")
    layer, step, value = re.fullmatch(r"(layers\.\d+\.weight)step (\d+)grad\.l2 ([\d.e-]+)", note).groups()
    assert layer == "layers.4.weight"
    assert abs(int(step) - 151) <= 1
    assert float(value) == pytest.approx(ill[0]["grad.l2"][int(step), 4], rel=0.006)


def test_clicking_a_layer_shows_its_trends(opened, ill):
    page = opened(*ill)

    _move(page, row=4, share=0.5)
    ActionChains(page.driver).click().perform()

    assert page["#layer-title"].text == "layers.4.weight"
    norms_T = ill[0]["grad.l2"][:, 4]
    told = page.all("#trends [role=img]")[0].get_attribute("aria-label")
    low, high = (float(n.replace(",", "")) for n in re.search(r"lowest (\S+), highest (\S+)$", told).groups())
    assert [low, high] == pytest.approx([norms_T.min(), norms_T.max()], rel=0.008)


def test_nan_is_seen_in_its_own_colour_and_a_layer_without_gradient_says_so(opened, ill):
    page = opened(*ill)

    assert NAN_COLOUR in _colours(page, "#map canvas")
    _move(page, row=7, share=0.5)
    ActionChains(page.driver).click().perform()
    assert "no value" in page["#readout"].text
    assert "No value at any step: grad.l2" in page["#trends"].text


def test_a_run_without_nan_has_none_of_that_colour(opened):
    page = opened(Synthetic(layers=3, steps=60).history())

    assert NAN_COLOUR not in _colours(page, "#map canvas")


def test_one_nan_in_20_000_steps_is_seen(opened):
    history = History(Synthetic(layers=40, steps=1).info)
    steps_T = np.arange(20_000)
    values = {"grad.l2": 1.0, "grad.nonfinite": 0.0}
    param_TSL = np.full((20_000, *history.param.shape), np.nan, np.float32)
    for name, value in values.items():
        param_TSL[:, history.param.statistics.index(name)] = value
    param_TSL[9_000, history.param.statistics.index("grad.l2"), 20] = np.nan
    param_TSL[9_000, history.param.statistics.index("grad.nonfinite"), 20] = 1
    history.report(
        Finding(code="GW001", kind="non-finite", layer=None, step=9_000, severity=Severity.CRITICAL, message="m")
    )
    history.param.fill(steps_T, param_TSL)
    history.run.fill(steps_T, np.ones((20_000, *history.run.shape)))

    page = opened(history)

    assert NAN_COLOUR in _colours(page, "#map canvas")


def test_no_layer_is_passed_over_where_there_are_more_than_pixels(opened):
    page = opened(Synthetic(layers=900, steps=2).history())
    lines = page.script("return document.querySelector('#map .u-over').clientHeight")
    run, steps = Synthetic(layers=2 * lines, steps=100), range(5, 100, 10)
    for i, step in enumerate(steps):
        run.non_finite(step=step, layers=400 + i)

    page = opened(run.history())

    reached = page.script(
        "const c = document.querySelector('#map canvas'); const [r, g, b] = arguments[0]; const xs = new Set();"
        " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " for (let i = 0; i < d.length; i += 4) if (d[i] === r && d[i + 1] === g && d[i + 2] === b)"
        " xs.add(i / 4 % c.width); return [...xs].sort((a, b) => a - b)",
        NAN_COLOUR,
    )
    stretches = 1 + sum(after - before > 1 for before, after in itertools.pairwise(reached))
    assert stretches == len(steps)


def test_the_keyboard_walks_the_map_and_is_told_what_is_there(opened, ill):
    page = opened(*ill)
    page.script("document.getElementById('statistic').focus()")
    keys = ActionChains(page.driver)
    for _ in range(4):  # the zoom buttons lie between
        keys.send_keys(Keys.TAB)
    keys.perform()

    assert page.script("return document.activeElement.id") == "map"
    assert page["#readout"].text.startswith("layers.0.weight · step 0 · grad.l2")
    ActionChains(page.driver).send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.PAGE_DOWN).perform()
    assert page["#readout"].text.startswith("layers.2.weight · step 11 · grad.l2")
    ActionChains(page.driver).send_keys(Keys.END, Keys.ENTER).perform()
    assert page["#readout"].text.startswith(f"layers.2.weight · step {STEPS - 1} ·")
    assert page["#layer-title"].text == "layers.2.weight"
    ActionChains(page.driver).send_keys("f").perform()
    assert page["#readout"].text.endswith("critical: GW101 vanishing-gradient")
    assert page["#readout"].get_attribute("aria-live") == "polite"


def test_zooming_shows_fewer_steps_and_comes_back(opened, ill):
    page = opened(*ill)

    def step_at(share):
        _move(page, row=4, share=share)
        return int(re.search(r"step (\d+)", page["#map .tooltip"].get_attribute("textContent"))[1])

    before = [step_at(0.1), step_at(0.9)]
    over = _over(page)
    drag = ActionChains(page.driver, duration=20).move_to_element_with_offset(over, 0, 0).click_and_hold()
    drag.move_by_offset(over.size["width"] // 4, 2).release().perform()
    zoomed = [step_at(0.1), step_at(0.9)]
    page["#zoom-reset"].click()

    assert before == pytest.approx([20, 180], abs=2)
    assert zoomed == pytest.approx([105, 145], abs=3), "half of the steps to three quarters"
    assert [step_at(0.1), step_at(0.9)] == before


def test_a_finding_is_shown_on_the_map_by_its_button(opened, ill):
    page = opened(*ill)

    page.script("document.querySelector('button.show').scrollIntoView({block: 'center'})")
    page["button.show"].click()

    assert page["#readout"].text.startswith(f"layers.0.weight · step {ONSET} ·")
    assert page.script("return document.activeElement.id") == "map"


def test_every_statistic_can_be_chosen_and_read_as_a_table(opened, ill):
    page = opened(*ill)
    page.script("document.getElementById('table').open = true")

    for name, rows in (("update.ratio", LAYERS), ("grad.mean", LAYERS), ("act.dead_frac", 2), ("grad.l2", LAYERS)):
        page.script("const s = document.getElementById('statistic'); s.value = arguments[0];", name)
        page.script("document.getElementById('statistic').dispatchEvent(new Event('change'))")
        assert name in page["#map"].get_attribute("aria-label")
        page.wait(lambda rows=rows: len(page.all("#table tbody tr")) == rows, f"{name} has no row per layer")
    cells = [cell.text for cell in page.all("#table tbody tr:nth-child(10) td")]
    assert float(cells[0]) == pytest.approx(ill[0]["grad.l2"][0, 9], rel=0.006)
    assert page.all("#table thead th")[1].text == "step 0"
    assert page.complaints() == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast_and_fits_a_narrow_window(opened, browser, ill, theme):
    browser.look(width=390, theme=theme)
    page = opened(*ill)

    read = "const s = getComputedStyle(document.documentElement); return arguments[0].map((n) => s.getPropertyValue(n))"
    paper, panel, *inks = page.script(read, ["--page", "--panel", *TEXT_COLOURS])
    for name, ink in zip(TEXT_COLOURS, inks, strict=True):
        assert _contrast(ink, paper) >= LEAST_CONTRAST, name
        assert _contrast(ink, panel) >= LEAST_CONTRAST, f"{name} on a panel"
    assert (_luminance(paper) < 0.5) == (theme == "dark")
    assert page.script("return document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"


def _luminance(colour):
    """Return the relative luminance (WCAG 2.2, glossary)."""
    parts = [int(colour.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one, other):
    dark, light = sorted([_luminance(one), _luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def test_what_others_named_is_only_text(opened):
    attack = "</script><img src=x onerror=document.title='run'>"
    run = Synthetic(layers=2, steps=20)
    run.info = replace(
        run.info, name=attack, layers=tuple(replace(p, name=f"{i}{attack}") for i, p in enumerate(run.info.layers))
    )

    page = opened(run.history(), config_text=attack)

    _move(page, row=1, share=0.5, rows=2)
    ActionChains(page.driver).click().perform()
    assert page["h1"].text == attack
    assert page["#layer-title"].text == f"1{attack}"
    assert attack in page["#readout"].text
    assert attack in page.driver.title
    assert page.all("img") == []
    assert page.complaints() == []


def test_a_run_without_a_step_is_a_short_page(opened):
    page = opened(History(Synthetic(layers=2, steps=1).info))

    assert "No steps recorded" in page["#findings"].text
    assert not page["#layers"].is_displayed()
    assert not page["nav a[href='#layers']"].is_displayed()
    assert page.complaints() == []


def test_on_paper_the_folded_parts_are_open_and_the_colours_light(opened, browser, ill):
    browser.look(theme="dark")
    page = opened(*ill)

    page.script("dispatchEvent(new Event('beforeprint'))")
    folded = [d for d in page.all("details") if not d.get_property("open")]
    paper = page.script("return getComputedStyle(document.documentElement).getPropertyValue('--page')")
    page.script("dispatchEvent(new Event('afterprint'))")

    assert folded == []
    assert _luminance(paper) > 0.9
    assert page.script("return document.documentElement.className") == ""
    assert page.complaints() == []


def test_headings_and_landmarks_lead_through_the_page(opened, ill):
    page = opened(*ill)

    levels = [int(h.tag_name[1]) for h in page.all("h1, h2, h3, h4, h5, h6") if h.is_displayed()]

    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels
    assert len(page.all("main, header.top, nav, footer")) == 4
    for section in page.all("main > section"):
        assert page[f"#{section.get_attribute('aria-labelledby')}"].text
