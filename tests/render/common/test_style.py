"""The styles of severities on a terminal."""

import pytest
from rich.color import ANSI_COLOR_NAMES
from rich.style import Style

from gradwatch.records import Severity
from gradwatch.render.common.sparkline import ASCII, UNICODE
from gradwatch.render.common.style import CODE, OK, SEVERITY, mark

STYLES = {"ok": OK, "code": CODE, **{str(severity): style for severity, style in SEVERITY.items()}}

# background, then green, yellow, cyan and bright red, as the terminals publish them
THEMES = {
    "VS Code dark": ("#1e1e1e", "#0dbc79", "#e5e510", "#11a8cd", "#f14c4c"),
    "VS Code light": ("#ffffff", "#107c10", "#949800", "#0598bc", "#cd3131"),
    "Windows Terminal, Campbell": ("#0c0c0c", "#13a10e", "#c19c00", "#3a96dd", "#e74856"),
    "Dracula": ("#282a36", "#50fa7b", "#f1fa8c", "#8be9fd", "#ff6e6e"),
}
USED = ("green", "yellow", "cyan", "bright_red")


def contrast(first, second):
    """Return the contrast of two colors, WCAG 2.1, 1.4.3."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", STYLES)
def test_a_color_is_one_of_the_16_that_a_theme_adapts(name):
    color = Style.parse(STYLES[name]).color

    assert color.name in USED
    assert ANSI_COLOR_NAMES[color.name] < 16


@pytest.mark.parametrize("theme", THEMES)
def test_every_color_can_be_read_on_common_themes(theme):
    background, *colors = THEMES[theme]

    assert {name: round(contrast(background, c), 1) for name, c in zip(USED, colors, strict=True)} == {
        name: pytest.approx(12, abs=9) for name in USED
    }, "at least 3:1"


@pytest.mark.parametrize("signs", [UNICODE, ASCII])
def test_the_sign_alone_tells_the_severity(signs):
    shown = [mark(severity, signs).plain for severity in (None, *Severity)]

    assert len(set(shown)) == len(shown)
    assert len({STYLES[str(severity)] for severity in Severity} | {OK}) == len(shown), "and so does the color"
