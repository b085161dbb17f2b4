"""Where agents and coordinators tell what happens."""

from __future__ import annotations

from typing import Protocol


class Say(Protocol):
    """Where what happens is told."""

    def __call__(self, event: str, text: str, **facts: object) -> None:
        """`event` and `facts` for machines, `text` for people."""
        ...
