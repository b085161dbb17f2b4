"""Layer times of a profile in the place of estimates: which steps were measured, and how long they take.

Prefill: prompts of the mean length; more of them than were measured together count as fewer, longer ones (attention over
other prompts is then counted too: never too fast). Decode: requests at their mean context. Aggregated: the time of the
decoding requests and that of the prompts beside them, added up (weights are then read twice: never too fast).
Steps larger than measured have no time, so no capacity rests on them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.domain.templates import CapacitySource
from coral_core.domain.workload import Lengths, Phase
from coral_core.perf.profile import Profile, ProfileCurves
from coral_core.perf.roofline import Step, mean_context_tokens

Floats = NDArray[np.float64]

UNKNOWN_S: Final = 1e9
"""What a step that was not measured takes: longer than any latency bound."""


def profiled_tps(profile: Profile, phase: Phase) -> tuple[int, ...]:
    """TP sizes with all times that a phase needs; empty where the phase cannot come from this profile."""
    return tuple(tp for tp in profile.tps if all(profile.curves(part, tp) is not None for part in _parts(phase)))


def measured_layer_s(profile: Profile, phase: Phase, tp: int, step: Step, lengths: Lengths) -> Floats:
    """Seconds of one layer for each step, (n,); UNKNOWN_S where a step is larger than measured."""
    prompts = np.where(step.prefill_tokens > 0, step.prefill_tokens / lengths.mean_input_tokens, 0.0)
    total = np.zeros_like(step.tokens)
    if Phase.PREFILL in _parts(phase):
        total += _prompt_s(profile.require(Phase.PREFILL, tp), prompts, lengths.mean_input_tokens)
    if Phase.DECODE in _parts(phase):
        curves = profile.require(Phase.DECODE, tp)
        known = curves.layer_times(np.maximum(step.decode_requests, 1.0), mean_context_tokens(lengths)).seconds
        total += np.where(step.decode_requests <= curves.largest_requests, known, UNKNOWN_S)
    return np.minimum(total, UNKNOWN_S)


def measured_fixed_s(profile: Profile, phase: Phase, tp: int, *, assumed_s: float) -> float:
    """The fixed part of a step; `assumed_s` where the profile does not know it."""
    known = (profile.require(part, tp).fixed_s for part in _parts(phase))
    return max(assumed_s if fixed_s is None else fixed_s for fixed_s in known)


def measured_source(profile: Profile, phase: Phase, lengths: Lengths) -> CapacitySource:
    """Interpolated where the lengths lie between measured ones at every TP, else extrapolated."""
    asked = {Phase.PREFILL: lengths.mean_input_tokens, Phase.DECODE: mean_context_tokens(lengths)}
    inside = all(
        curves.tokens[0] <= asked[part] <= curves.tokens[-1]
        for tp in profiled_tps(profile, phase)
        for part in _parts(phase)
        for curves in (profile.require(part, tp),)
    )
    return CapacitySource.INTERPOLATED if inside else CapacitySource.EXTRAPOLATED


def _prompt_s(curves: ProfileCurves, prompts: Floats, tokens: float) -> Floats:
    """Seconds of so many prompts of `tokens`; a fraction of a prompt takes that share of one."""
    most = curves.largest_requests
    largest = max(float(x[-1]) * length for x, length in zip(curves.requests, curves.tokens, strict=True))
    seconds = np.zeros_like(prompts)
    for index, count in enumerate(prompts.tolist()):
        together = min(max(count, 1.0), most)
        length = tokens * max(count, 1.0) / together
        if count > 1 and together * length > max(largest, tokens):
            seconds[index] = UNKNOWN_S
        elif count > 0:
            one_s = curves.layer_times(np.array([together]), length).seconds[0]
            # One length says nothing of how times grow with it: longer prompts then take more in proportion.
            longer = max(length / curves.tokens[0], 1.0) if len(curves.tokens) == 1 else 1.0
            seconds[index] = min(count, 1.0) * longer * one_s
    return seconds


def _parts(phase: Phase) -> tuple[Phase, ...]:
    return (Phase.PREFILL, Phase.DECODE) if phase is Phase.AGGREGATED else (phase,)
