"""The one tree of expected failures; anything outside it is a bug and keeps its traceback.

Every error says *what* is wrong, *where* (file:line or key path) and, where there is one, the *fix*.
The CLI prints an error of this tree as one line and exits with its `exit_code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class CoralError(Exception):
    """An expected failure: names the thing, the place and what to do.

    `str(error)` is a single line `where: what (fix)`. Picklable, so that it survives a process boundary.
    """

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "error"

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.fix:
            text = f"{text} ({self.fix})"
        return " ".join(text.split())

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.fix))

    def at(self, place: str) -> CoralError:
        """The same error, its place prefixed by `place` (an outer file, item or key)."""
        where = f"{place}.{self.where}" if self.where else place
        return type(self)(self.what, where=where, fix=self.fix)


def _rebuild(cls: type[CoralError], what: str, where: str, fix: str) -> CoralError:
    return cls(what, where=where, fix=fix)


class InputError(CoralError):
    """What the user gave is wrong: a value, a name, a file, a unit."""

    exit_code = 2
    kind = "input"


class NoSolutionError(CoralError):
    """The question is well-formed and has no answer, or not the full one that was required."""

    exit_code = 3
    kind = "no_solution"


class DataGapError(CoralError):
    """A fact that the answer needs is not known; it is never guessed and never read as zero."""

    exit_code = 4
    kind = "data_gap"


class SolverError(CoralError):
    """A solver is missing, unlicensed, or failed."""

    exit_code = 5
    kind = "solver"


class StoreError(CoralError):
    """The object store cannot be reached, refuses, or holds something that is not what its key says."""

    exit_code = 6
    kind = "store"


class StoreUnreachableError(StoreError):
    """The object store does not answer, or fails by itself: the same call may succeed later, and may have taken effect."""

    kind = "store_unreachable"


class StoreConflictError(StoreError):
    """Another writer won a put-if-absent: refresh and try again."""

    kind = "store_conflict"


class ProvisionError(CoralError):
    """A cloud call failed or would break a limit."""

    exit_code = 7
    kind = "provision"


class ServingError(CoralError):
    """An engine, agent, coordinator or gateway failed."""

    exit_code = 8
    kind = "serving"


class MeasurementError(CoralError):
    """A measurement was refused: too noisy, impossible, or incomplete."""

    exit_code = 9
    kind = "measurement"


def unknown_name(kind: str, name: str, known: Iterable[str], *, where: str = "") -> InputError:
    """The error for a `name` that is no known `kind` (GPU, model, region, ...): near misses first, else all names."""
    names = sorted(known)
    by_folded = {candidate.casefold(): candidate for candidate in names}
    begun = [folded for folded in by_folded if name and folded.startswith(name.casefold())]
    alike = difflib.get_close_matches(name.casefold(), by_folded, n=3, cutoff=0.5)
    near = [by_folded[folded] for folded in dict.fromkeys([*begun, *alike])][:3]
    everything = f"known: {', '.join(names)}" if names else "none is known"
    fix = f"did you mean {' or '.join(near)}?" if near else everything
    return InputError(f"unknown {kind} {name!r}", where=where, fix=fix)
