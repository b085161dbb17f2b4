"""As how many a request for several answers counts: in the model's queue, and for the limits of its key."""

from __future__ import annotations

import pytest

from coral_core.domain.workload import Phase, Slo
from coral_core.serving.limits import KeyLimiter, KeyTerms
from coral_core.serving.refusals import RefusedError
from coral_core.serving.table import InstanceSpec, ModelTerms, RoutingTable
from coral_core.serving.waiting import Waiting


def test_a_request_for_several_answers_is_as_many_to_those_behind_it():
    terms = ModelTerms(name="m", slo=Slo(ttft_s=1.0, tpot_s=1.0), mean_input_tokens=1.0, mean_output_tokens=1.0)
    table = RoutingTable([terms])
    for phase in (Phase.PREFILL, Phase.DECODE):
        spec = InstanceSpec(name=phase.value, model="m", phase=phase, url="http://h:1", weight=10.0)
        table.probed(table.register(spec), answers=True, now_s=0.0)
    pool = table.pools["m"]
    waiting = Waiting(pool, unknown_s=1.0)
    ticket = waiting.admit(0.0, count=128)
    assert pool.unheard == 128
    with pytest.raises(RefusedError, match="127 requests"):
        waiting.admit(0.0)
    ticket.hand_over()
    assert (pool.unheard, pool.handing) == (0, 128)
    ticket.heard()
    assert (pool.unheard, pool.handing) == (0, 0)
    assert waiting.admit(0.0)


def test_a_key_is_charged_for_every_answer():
    limiter = KeyLimiter(KeyTerms(requests_per_s=1.0, burst_requests=2, concurrent_requests=4))
    limiter.enter(0.0)
    with pytest.raises(RefusedError, match="5 answers, this API key may have 4") as refused:
        limiter.widen(5)
    assert refused.value.status == 400
    limiter.widen(3)
    assert limiter.bucket.wait_s(0.0) == 2.0  # of 2 it has taken 3
    limiter.enter(2.0)
    with pytest.raises(RefusedError, match="3 requests running and may have 4, this one counts as 2") as refused:
        limiter.widen(2)
    assert refused.value.status == 429
    limiter.leave()
    limiter.leave(3)
    assert limiter.running == 0
