"""The colours of charts and pages, light and dark, and what tells series apart besides colour.

Every colour that is written or drawn with has a contrast of at least 4.5:1 to what it stands on (WCAG 2.2, 1.4.3), in
both themes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LIGHT: Final[Mapping[str, str]] = {
    "paper": "#ffffff",
    "panel": "#f4f6f8",
    "ink": "#1c2733",
    "soft": "#526070",
    "grid": "#d5dbe1",
    "mark": "#a34700",
    "land": "#e2e7ec",
    "warn": "#8f1d1d",
    "s0": "#0b5cad",
    "s1": "#a34700",
    "s2": "#1b7035",
    "s3": "#7b3294",
    "s4": "#b2182b",
    "s5": "#006a74",
    "s6": "#665c00",
    "s7": "#55606c",
}
DARK: Final[Mapping[str, str]] = {
    "paper": "#14191f",
    "panel": "#1d242c",
    "ink": "#e8edf2",
    "soft": "#a9b5c1",
    "grid": "#39444f",
    "mark": "#f2a25c",
    "land": "#2a333d",
    "warn": "#ff9d94",
    "s0": "#6cb2f5",
    "s1": "#f2a25c",
    "s2": "#74c98a",
    "s3": "#cf9bea",
    "s4": "#ff8f8f",
    "s5": "#5fd0d8",
    "s6": "#d6c84a",
    "s7": "#aab5c0",
}
GROUNDS: Final = ("paper", "panel")
"""What colours stand on; a name or figure on a filled shape is of the colour of the paper."""
NOT_WRITTEN: Final = (*GROUNDS, "grid", "land")
"""Grounds, and lines that only guide the eye: nothing can be read from them that is not written beside them."""

STYLES: Final = 8
"""Colours; further styles have them again, with other dashes and markers (`turned`)."""
DASHES: Final = ("", "7 4", "2 3", "9 3 2 3", "5 2", "12 4", "2 2 6 2", "1 4")
MARKERS: Final = ("circle", "square", "triangle", "diamond", "ring", "frame", "down", "cross")


def theme_css(selector: str) -> str:
    """The colours as custom properties of `selector`, in the reader's own theme."""

    def properties(theme: Mapping[str, str]) -> str:
        return " ".join(f"--{name}: {colour};" for name, colour in theme.items())

    return (
        f"{selector} {{ color-scheme: light dark; {properties(LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ {selector} {{ {properties(DARK)} }} }}\n"
    )


CHART_CSS: Final = """
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .title { font-size: 17px; font-weight: 600; } svg .panel { font-size: 13px; font-weight: 600; }
svg .value { paint-order: stroke; stroke: var(--paper); stroke-width: 5px; stroke-linejoin: round; }
svg .soft { fill: var(--soft); } svg .ground { fill: var(--paper); } svg .on { fill: var(--paper); font-weight: 600; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--soft); } svg .land { fill: var(--land); }
svg .line { fill: none; stroke-width: 2; } svg .mark { fill: none; stroke: var(--mark); stroke-width: 2; }
svg .guide { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 4 3; } svg .whisker { stroke: var(--ink); }
""" + "".join(f"svg .s{i} {{ color: var(--s{i}); }}\n" for i in range(STYLES))
"""What shapes of a chart look like; a shape of style i has the class s<i> and draws in currentColor."""


def turned(style: int) -> int:
    """Which dashes and marker a style has: with its colour they are no other's among the first STYLES x STYLES."""
    return (style + style // STYLES) % STYLES


def marker(style: int, x: float, y: float, tooltip: str = "") -> str:
    """The marker of a style around a point, in the current colour; `tooltip` is markup already."""
    shape, r = MARKERS[turned(style)], 3.6
    at = f'cx="{x:.1f}" cy="{y:.1f}"'
    match shape:
        case "circle":
            tag, rest = "circle", f'{at} r="{r}" fill="currentColor"'
        case "ring":
            tag, rest = "circle", f'{at} r="{r}" fill="var(--paper)" stroke="currentColor" stroke-width="1.6"'
        case "square":
            tag, rest = "path", f'd="M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h-{2 * r}z" fill="currentColor"'
        case "frame":
            tag = "path"
            rest = (
                f'd="M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h-{2 * r}z" fill="var(--paper)" stroke="currentColor" '
                'stroke-width="1.6"'
            )
        case "triangle":
            tag, rest = "path", f'd="M{x:.1f} {y - 4.6:.1f}l4.4 8h-8.8z" fill="currentColor"'
        case "down":
            tag, rest = "path", f'd="M{x:.1f} {y + 4.6:.1f}l4.4 -8h-8.8z" fill="currentColor"'
        case "diamond":
            tag, rest = "path", f'd="M{x:.1f} {y - 4.8:.1f}l4.8 4.8l-4.8 4.8l-4.8 -4.8z" fill="currentColor"'
        case _:
            tag = "path"
            rest = (
                f'd="M{x - r:.1f} {y - r:.1f}l{2 * r} {2 * r}m0 -{2 * r}l-{2 * r} {2 * r}" fill="none" '
                'stroke="currentColor" stroke-width="2"'
            )
    return f"<{tag} {rest}>{f'<title>{tooltip}</title>' if tooltip else ''}</{tag}>"


def line_sample(style: int) -> str:
    """A short line of a style with its marker, for legends: a whole SVG, hidden from who does not see it."""
    return (
        f'<svg class="s{style % STYLES}" width="36" height="12" viewBox="0 0 36 12" aria-hidden="true">'
        f'<path d="M1 6h34" stroke="currentColor" stroke-width="2" stroke-dasharray="{DASHES[turned(style)]}"/>'
        f"{marker(style, 18, 6)}</svg>"
    )
