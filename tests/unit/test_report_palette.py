"""Colours can be read in both themes, and nothing is told by its colour alone."""

from __future__ import annotations

import re

import pytest

from coral_core.report.palette import (
    CHART_CSS,
    DARK,
    DASHES,
    GROUNDS,
    LIGHT,
    MARKERS,
    NOT_WRITTEN,
    STYLES,
    line_sample,
    marker,
    theme_css,
)

LEAST_CONTRAST = 4.5


def luminance(colour: str) -> float:
    """Relative luminance of an sRGB colour as WCAG 2.2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_as_defined():
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_all_that_is_written_can_be_read_on_all_it_stands_on(theme):
    weak = {
        (name, ground): contrast(theme[name], theme[ground])
        for name in theme
        for ground in GROUNDS
        if name not in NOT_WRITTEN and contrast(theme[name], theme[ground]) < LEAST_CONTRAST
    }
    assert not weak
    assert theme.keys() == LIGHT.keys()


def test_names_on_the_map_and_on_land_can_be_read():
    for theme in (LIGHT, DARK):
        assert contrast(theme["s0"], theme["land"]) >= LEAST_CONTRAST


def test_styles_differ_without_colour():
    assert len(set(DASHES)) == len(set(MARKERS)) == STYLES
    drawn = {marker(style, 0, 0) for style in range(STYLES)}
    assert len(drawn) == STYLES
    assert "<title>a</title>" in marker(3, 1, 2, "a")
    samples = [line_sample(style) for style in range(STYLES * STYLES)]
    assert len(set(samples)) == STYLES * STYLES  # also of charts with more series than colours
    assert 'class="s2"' in samples[2 + STYLES]
    assert 'aria-hidden="true"' in line_sample(0)


def test_every_colour_that_is_used_is_defined_in_both_themes():
    css = theme_css(":root")
    light, dark = css.split("@media")
    for used in re.findall(r"var\(--(\w+)\)", CHART_CSS + "".join(marker(i, 0, 0) for i in range(STYLES))):
        assert f"--{used}: {LIGHT[used]};" in light
        assert f"--{used}: {DARK[used]};" in dark
    assert "prefers-color-scheme: dark" in css
