"""A page read as a browser would, as far as tests ask: elements, their attributes and texts; refuses broken nesting."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = frozenset({"meta", "link", "br", "img", "hr", "input"})

REFERENCES = frozenset({"src", "srcset", "href", "xlink:href", "action", "data", "poster"})
KINDS = ("predicted", "simulated", "measured", "input of the scenario")


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    parents: tuple[str, ...]
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text inside, spaces made single."""
        return " ".join("".join(self.parts).split())


class Reader(HTMLParser):
    """`elements` in the order they open."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self._open: list[Element] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        element = Element(tag, dict(attrs), tuple(one.tag for one in self._open))
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs), tuple(one.tag for one in self._open)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.parts.append(data)


def read_page(html: str) -> list[Element]:
    """All elements of a page that is well nested."""
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert not reader._open, f"never closed: {[one.tag for one in reader._open]}"
    return reader.elements


def faults(html: str) -> list[str]:
    """What a self-contained and accessible page must not have."""
    elements = read_page(html)
    idents = [one.attributes["id"] for one in elements if one.attributes.get("id")]
    found = [f"id {ident} twice" for ident in set(idents) if idents.count(ident) > 1]
    for one in elements:
        found += _references(one, set(idents)) + _untold(one)
    words = ("url(", "@import", "http://", "https://", "NaN", ">None<", ">nan<", "inf<")
    return found + [f"holds {word}" for word in words if word in html]


def _references(one: Element, idents: set[str | None]) -> list[str]:
    """What it asks of elsewhere, or runs."""
    found = [f"<{one.tag}>"] if one.tag in {"script", "iframe", "object", "embed", "img"} else []
    for name, value in one.attributes.items():
        target = value or ""
        if name in REFERENCES and not target.startswith(("#", "data:")):
            found.append(f"<{one.tag}> refers to {value}")
        if name == "href" and target.startswith("#") and target[1:] not in idents:
            found.append(f"{value} leads nowhere")
        if name.startswith("on"):
            found.append(f"<{one.tag}> has {name}")
    return found


def _untold(one: Element) -> list[str]:
    """What it shows and does not tell."""
    attributes, found = one.attributes, []
    is_hidden = attributes.get("aria-hidden") == "true"
    if one.tag == "svg" and not is_hidden and not (attributes.get("role") == "img" and attributes.get("aria-label")):
        found.append("an svg without a text")
    if one.tag == "th" and attributes.get("scope") not in {"row", "col"}:
        found.append(f"<th> without scope: {one.text}")
    if one.tag == "figure" and not any(kind in one.text for kind in KINDS):
        found.append(f"a figure of no kind: {one.text[:60]}")
    return found
