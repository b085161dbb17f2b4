"""Cases small enough to be worked out on paper; every expected instant is derived in the comment beside it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from coral_core.domain.workload import Phase
from coral_core.sim.inputs import Routing, SimModel, SimNode
from coral_core.sim.outcome import RequestStatus
from coral_core.sim.run import simulate
from tests.fakes.sim_cases import disaggregated, first_and_finish, instance, node, requests, simulation, stage

DONE, FAILED, REJECTED = RequestStatus.DONE, RequestStatus.FAILED, RequestStatus.REJECTED


def test_prompts_join_running_decodes():
    one = instance("i", stage(node(fixed_s=1.0, token_s=0.01)), max_batched_tokens=120)
    outcome = simulate(simulation([one], requests((0.0, 100, 3), (0.5, 50, 2))))
    # 0: 100 tokens take 2.0. Then 1 + 50 tokens take 1.51, then two decodes 1.02.
    assert first_and_finish(outcome) == [(2.0, 4.53), (3.51, 4.53)]
    assert outcome.requests.scheduled_s.tolist() == [0.0, 2.0]
    assert outcome.fleet.busy_s.sum() == pytest.approx(4.53)
    assert outcome.fleet.emitted_tokens.sum() == 5


def test_a_long_prompt_is_cut_into_chunks_and_pairs_do_not_depend_on_the_cut():
    asked = requests((0.0, 300, 1))
    costs = {"fixed_s": 1.0, "token_s": 0.01, "pair_s": 1e-4}
    chunked = simulate(simulation([instance("i", stage(node(**costs)), max_batched_tokens=120)], asked))
    whole = simulate(simulation([instance("i", stage(node(**costs)), max_batched_tokens=300)], asked))
    # Pairs 300^2/2 = 45,000 cost 4.5 either way; chunks of 120, 120, 60 cost two more fixed seconds.
    assert first_and_finish(whole) == [(8.5, 8.5)]
    assert first_and_finish(chunked) == [(10.5, 10.5)]
    assert chunked.fleet.iterations.sum() == 3


def test_decoding_reads_the_context_and_samples_rows():
    one = instance("i", stage(node(fixed_s=1.0, kept_token_s=0.01, row_s=0.5)))
    outcome = simulate(simulation([one], requests((0.0, 100, 3))))
    # Prompt 1 + one row 0.5; then contexts of 101 and 102 tokens: 1 + 0.5 + 1.01, 1 + 0.5 + 1.02.
    assert first_and_finish(outcome) == [(1.5, 1.5 + 2.51 + 2.52)]


def test_half_the_layers_with_a_window_read_and_attend_less():
    model = SimModel(name="m", window_tokens=40, window_frac=0.5)
    one = instance("i", stage(node(kept_token_s=0.01, pair_s=1e-3)))
    outcome = simulate(simulation([one], requests((0.0, 100, 2)), model=model))
    # Pairs: half of 5,000 and half of 40 * 100 - 800 = 3,200. KV at 101: half of 101 and half of 40.
    assert first_and_finish(outcome) == [(4.1, 4.1 + 0.705)]
    assert outcome.peak_kv_blocks.tolist() == [5], "70.5 tokens kept on average are 5 blocks, not 7"


def test_a_pipeline_pays_hops_and_bandwidth_both_ways():
    model = SimModel(name="m", activation_bytes_per_token=10.0)
    first, second = node(fixed_s=1.0, token_s=0.01, nic=1000.0), node(fixed_s=0.5, token_s=0.02, nic=2000.0)
    one = instance("i", stage(first), stage(second), hop_s=0.1)
    outcome = simulate(simulation([one], requests((0.0, 100, 2)), model=model))
    # 2.0 + (1,000 bytes at the slower NIC 1.0 + 0.1) + 2.5 = 5.6; back 0.1; 1.01 + 0.01 + 0.1 + 0.52.
    assert first_and_finish(outcome) == [(5.6, 7.34)]


def test_nodes_of_one_machine_exchange_nothing_over_the_nic():
    model = SimModel(name="m", activation_bytes_per_token=10.0)
    ends = [node(fixed_s=1.0, nic=1.0, machine="x"), node(fixed_s=1.0, nic=1.0, machine="x")]
    outcome = simulate(simulation([instance("i", *map(stage, ends), hop_s=0.25)], requests((0.0, 100, 1)), model=model))
    assert first_and_finish(outcome) == [(2.25, 2.25)]


def test_a_node_that_is_a_pipeline_inside_is_free_before_its_results_are_there():
    inside = node(fixed_s=1.0, depth=3, inner_hop_s=0.1, inner_hop_token_s=0.01)
    one = instance("i", stage(inside), max_batched_tokens=50)
    outcome = simulate(simulation([one], requests((0.0, 50, 1), (0.0, 50, 1))))
    # Each takes 3 * 1 + 2 * (0.1 + 50 * 0.01) = 4.2; the second starts after the first's first second.
    assert first_and_finish(outcome) == [(4.2, 4.2), (5.2, 5.2)]


@pytest.mark.parametrize(
    ("micro_batches", "finish_s"), [(1, [4.0 + 2 * 4.0] * 2), (2, [4.0 + 2 * 2.0, 4.0 + 2 * 2.0 + 1])]
)
def test_micro_batches_keep_both_stages_busy(micro_batches, finish_s):
    one = instance("i", stage(node(token_s=1.0)), stage(node(token_s=1.0)), micro_batches=micro_batches)
    outcome = simulate(simulation([one], requests((0.0, 1, 3), (0.0, 1, 3))))
    # Two tokens per stage take 2 s together, first tokens at 4. Together a round takes 4 s. In two micro-batches one
    # computes in the first stage while the other is in the second: a round takes 2 s, the second one a second later.
    assert outcome.requests.finish_s.tolist() == pytest.approx(finish_s)


def test_a_step_is_through_when_its_last_part_is():
    quick, slow = node(fixed_s=1.0), node(fixed_s=3.0)
    one = instance("i", stage(quick, slow), stage(node(fixed_s=1.0)), hop_s=0.5, micro_batches=2)
    outcome = simulate(simulation([one], requests((0.0, 1, 2), (0.0, 1, 1), (0.1, 1, 1))))
    # First step: both parts have reached the second stage at 3.5; through at 4.5. The third request, on the quick node, is
    # a step of its own from 1.0 to 2.0, and then waits for the first one to pass. Back at 5.0, the first takes another 2.5.
    assert first_and_finish(outcome) == [(4.5, 7.5), (4.5, 4.5), (5.5, 5.5)]
    assert outcome.fleet.iterations[0].tolist() == [3.0, 1.0, 3.0]


def test_nodes_of_a_stage_have_limits_of_their_own():
    wide, narrow = node(fixed_s=1.0), SimNode(timing=node(fixed_s=1.0).timing, max_running_requests=1)
    one = instance("i", stage(wide, narrow), max_running_requests=2)
    outcome = simulate(simulation([one], requests(*[(0.0, 1, 1)] * 4)))
    assert sorted(outcome.requests.finish_s.tolist()) == [1.0, 1.0, 1.0, 2.0]
    short = SimNode(timing=node(fixed_s=1.0).timing, max_batched_tokens=10)
    chunked = simulate(simulation([instance("i", stage(short), max_batched_tokens=100)], requests((0.0, 25, 1))))
    assert chunked.requests.finish_s.tolist() == [3.0]


def test_a_short_chunk_does_not_overtake_a_long_one_inside_a_node():
    one = instance("i", stage(node(token_s=0.01, depth=2)), max_batched_tokens=100)
    outcome = simulate(simulation([one], requests((0.0, 110, 1))))
    # 100 tokens are through at 2.0; the 10 after them, computed from 1.0 to 1.1, would be through at 1.2.
    assert first_and_finish(outcome) == [(2.0, 2.0)]


def test_requests_are_bound_to_a_stages_nodes_by_weight():
    heavy, light = node(fixed_s=1.0, weight=2.0), node(fixed_s=1.0, weight=1.0)
    one = instance("i", stage(heavy, light))
    outcome = simulate(simulation([one], requests(*[(10.0 * k, 1, 1) for k in range(9)])))
    assert outcome.fleet.iterations[0].tolist() == [6.0, 3.0]


@pytest.mark.parametrize(("routing", "third_s"), [(Routing.WEIGHTED_ROUND_ROBIN, 11.0), (Routing.LEAST_WORK, 2.1)])
def test_a_router_that_sees_work_spares_short_prompts_the_long_one(routing, third_s):
    twins = [instance(name, stage(node(token_s=0.01)), max_running_requests=1) for name in ("a", "b")]
    outcome = simulate(simulation(twins, requests((0.0, 1000, 1), (0.1, 100, 1), (0.2, 100, 1)), routing=routing))
    # The long prompt keeps the first instance busy until 10; in turns, the third request waits for it.
    assert outcome.requests.first_token_s.tolist() == pytest.approx([10.0, 1.1, third_s])


KV_MODEL = SimModel(name="m", kv_bytes_per_token=10.0)


def test_kv_moves_from_prefill_to_decode_over_the_shared_nic():
    outcome = simulate(simulation(disaggregated(), requests((0.0, 100, 3), (0.0, 100, 3)), model=KV_MODEL))
    # 200 tokens: 3.0. KV of one: 100 * 10 bytes * 2 layers at 1,000 bytes/s = 2 s, one after the other: 5.0 and 7.0.
    # First: 1.01 twice, 7.02. Second waits for that iteration's end, then 1.01 twice.
    assert first_and_finish(outcome) == [(3.0, 7.02), (3.0, 9.04)]
    assert outcome.requests.decode_s.tolist() == pytest.approx([5.0, 7.0])
    assert outcome.requests.prefill_instance.tolist() == [0, 0]
    assert outcome.requests.instance.tolist() == [1, 1]
    assert outcome.fleet.emitted_tokens[0].tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    ("rate", "kv_s"),
    [
        (1000.0, 3.0),  # 2 s of KV fit beside 2 s of computation; the last layer, 1 s, is sent when it is there
        (4000.0, 2.25),
        (500.0, 4.0),  # 4 s of KV, begun with the computation
    ],
)
def test_streamed_kv_leaves_while_later_layers_are_computed(rate, kv_s):
    prefill = instance("p", stage(node(fixed_s=1.0, token_s=0.01, nic=rate), layers=2), phase=Phase.PREFILL)
    outcome = simulate(
        simulation([prefill, disaggregated()[1]], requests((0.0, 100, 3)), model=KV_MODEL, stream_kv=True)
    )
    assert outcome.requests.decode_s.tolist() == pytest.approx([kv_s])
    assert first_and_finish(outcome) == [(2.0, kv_s + 2.02)]


def test_streamed_kv_and_activations_share_the_nic():
    model = SimModel(name="m", kv_bytes_per_token=40.0, activation_bytes_per_token=10.0)
    stages = [stage(node(fixed_s=1.0, nic=1000.0)), stage(node(fixed_s=1.0, nic=1000.0))]
    prefill = instance("p", *stages, phase=Phase.PREFILL)
    decode = instance("d", stage(node(fixed_s=1.0), layers=2), phase=Phase.DECODE)
    outcome = simulate(simulation([prefill, decode], requests((0.0, 100, 2)), model=model, stream_kv=True))
    # Each node sends 4 s of KV and has 1 s of activations to send or receive, from 0 on; the prompt is done at 3; the
    # last layer takes 4 s.
    assert outcome.requests.first_token_s.tolist() == pytest.approx([3.0])
    assert outcome.requests.decode_s.tolist() == pytest.approx([7.0])


def test_kv_that_finds_no_room_is_sent_once_there_is():
    """The decode node has room for one request: the other's KV stays where it is until the first is done."""
    pair = disaggregated()
    pair[1] = instance("d", stage(node(fixed_s=1.0, kv_blocks=8), layers=2), phase=Phase.DECODE)
    asked = requests((0.0, 100, 3), (0.0, 100, 3))
    outcome = simulate(simulation(pair, asked, model=KV_MODEL, stream_kv=True))
    # Prompts are done at 3, the first's KV is there a layer later, at 4, and it decodes until 6. The second's 2 s of KV
    # follow whole.
    assert outcome.requests.decode_s.tolist() == pytest.approx([4.0, 8.0])


def test_streaming_takes_room_while_the_decode_node_computes():
    """Without streaming the KV is sent for when the node next forms a batch."""
    prefill = instance("p", stage(node(fixed_s=1.0)), phase=Phase.PREFILL, max_running_requests=1)
    decode = instance("d", stage(node(fixed_s=2.0)), phase=Phase.DECODE)
    given = requests((0.0, 1, 2), (1.5, 1, 2))
    found = {
        stream: simulate(simulation([prefill, decode], given, stream_kv=stream)).requests.decode_s[1]
        for stream in (True, False)
    }
    assert found == {True: pytest.approx(2.5), False: pytest.approx(3.0)}


def test_a_request_alone_takes_as_long_aggregated_as_disaggregated_but_for_the_transfer():
    asked = requests((0.0, 100, 3))
    apart = simulate(simulation(disaggregated(), asked, model=KV_MODEL))
    together = simulate(simulation([instance("a", stage(node(fixed_s=1.0, token_s=0.01), layers=2))], asked))
    assert apart.requests.first_token_s == pytest.approx(together.requests.first_token_s)
    assert apart.requests.finish_s == pytest.approx(together.requests.finish_s + 2.0)


def test_kv_of_each_layer_goes_to_the_node_that_holds_it():
    prefill = instance(
        "p", stage(node(fixed_s=1.0, nic=1000.0), layers=3), stage(node(fixed_s=1.0, nic=1000.0), layers=1),
        phase=Phase.PREFILL,
    )  # fmt: skip
    decode = instance(
        "d", stage(node(fixed_s=1.0, nic=1000.0), layers=2), stage(node(fixed_s=1.0, nic=1000.0), layers=2),
        phase=Phase.DECODE,
    )  # fmt: skip
    outcome = simulate(simulation([prefill, decode], requests((0.0, 100, 2)), model=KV_MODEL))
    # Prompt done at 2. The first node sends layers 0-1 to the first one until 4 and layer 2 to the second until 5; the
    # second node sends layer 3 there meanwhile. One decode through both stages.
    assert outcome.requests.decode_s.tolist() == pytest.approx([5.0])
    assert first_and_finish(outcome) == [(2.0, 7.0)]


def test_activations_overtake_kv_and_delay_it_by_their_bytes():
    model = SimModel(name="m", kv_bytes_per_token=40.0, activation_bytes_per_token=10.0)
    stages = [stage(node(fixed_s=1.0, nic=1000.0)), stage(node(fixed_s=1.0, nic=1000.0))]
    prefill = instance("p", *stages, phase=Phase.PREFILL, max_batched_tokens=100, micro_batches=2)
    decode = instance("d", stage(node(fixed_s=1.0), layers=2), phase=Phase.DECODE)
    outcome = simulate(simulation([prefill, decode], requests((0.0, 100, 2), (2.5, 100, 2)), model=model))
    # First: stage 0 until 1, activations until 2, stage 1 until 3; 4 s of KV leave each node until 7. Second: stage 0
    # until 3.5, its activations do not wait for that KV: stage 1 from 4.5 until 5.5. Its KV leaves the second node from
    # 7 to 11, the first one, which sent 1 s of activations meanwhile, from 8 to 12.
    assert outcome.requests.first_token_s.tolist() == pytest.approx([3.0, 5.5])
    assert outcome.requests.decode_s.tolist() == pytest.approx([7.0, 12.0])


def test_a_fast_receiver_takes_from_slow_senders_at_once():
    prefill = [instance(name, stage(node(fixed_s=1.0, nic=1000.0)), phase=Phase.PREFILL) for name in ("p", "q")]
    decode = instance("d", stage(node(fixed_s=1.0, nic=4000.0)), phase=Phase.DECODE)
    asked = requests((0.0, 100, 2), (0.0, 100, 2), (0.0, 100, 2))
    outcome = simulate(simulation([*prefill, decode], asked, model=KV_MODEL))
    # 1,000 bytes each, two by the first sender: 1 to 2 and 2 to 3, one by the second: 1 to 2.
    assert outcome.requests.decode_s.tolist() == pytest.approx([2.0, 2.0, 3.0])


def test_fast_senders_share_a_slow_receiver():
    prefill = [instance(name, stage(node(fixed_s=1.0)), phase=Phase.PREFILL) for name in ("p", "q")]
    decode = instance("d", stage(node(fixed_s=1.0, nic=1000.0)), phase=Phase.DECODE)
    outcome = simulate(simulation([*prefill, decode], requests((0.0, 100, 2), (0.0, 100, 2)), model=KV_MODEL))
    assert outcome.requests.decode_s.tolist() == pytest.approx([2.0, 3.0])


@pytest.mark.parametrize("machine", ["", "x"])
def test_senders_share_a_receivers_nic_and_replicas_their_own(machine):
    model = SimModel(name="m", activation_bytes_per_token=10.0)
    senders = stage(*[node(fixed_s=1.0, nic=1000.0, machine=machine)] * 2)
    receivers = stage(*[node(fixed_s=1.0, nic=1000.0)] * (2 if machine else 1))
    outcome = simulate(simulation([instance("i", senders, receivers)], requests(*[(0.0, 100, 1)] * 2), model=model))
    # Both have computed at 1; their bytes pass the one NIC from 1 to 2 and from 2 to 3, be it a sender's or a receiver's.
    # One receiver computes both at once; of two, one is done at 3, but the step that both are part of is through at 4.
    assert outcome.requests.first_token_s.tolist() == pytest.approx([4.0, 4.0])


def test_a_prompt_is_decoded_with_the_weights_that_computed_it():
    pairs = [replace(one, name=f"{one.name}{variant}", variant=variant) for one in disaggregated() for variant in "xy"]
    outcome = simulate(simulation(pairs, requests(*[(10.0 * k, 100, 2) for k in range(4)]), model=KV_MODEL))
    assert outcome.queues == ("m", "m x decode", "m y decode")
    names = np.array(outcome.instances)
    taken = zip(names[outcome.requests.prefill_instance], names[outcome.requests.instance], strict=True)
    assert list(taken) == [("px", "dx"), ("py", "dy")] * 2


def test_kv_that_is_there_waits_for_its_turn_to_run():
    pair = disaggregated()
    pair[1] = instance("d", *pair[1].stages, phase=Phase.DECODE, max_running_requests=1)
    outcome = simulate(simulation(pair, requests((0.0, 100, 5), (0.0, 100, 3)), model=KV_MODEL))
    # KV at 5.0 and 7.0; the first decodes four tokens until 9.04, then the second two.
    assert outcome.requests.decode_s.tolist() == pytest.approx([5.0, 7.0])
    assert outcome.requests.finish_s.tolist() == pytest.approx([9.04, 11.06])


def test_decodes_of_other_nodes_do_not_starve_a_chunk():
    first, second = stage(node(fixed_s=1.0), node(fixed_s=1.0)), stage(node(fixed_s=1.0))
    one = instance("i", first, second, max_batched_tokens=10, micro_batches=2)
    asked = requests((0.0, 1, 50), (0.0, 1, 1), (0.5, 1, 50), (10.0, 10, 1))
    outcome = simulate(simulation([one], asked))
    # Two requests keep the second stage busy with one decode after another; a chunk as large as the budget joins one.
    assert outcome.requests.first_token_s[3] <= 14.0
    assert outcome.requests.finish_s[0] > 90.0


def test_the_latest_admitted_gives_way_and_is_computed_again():
    one = instance("i", stage(node(fixed_s=1.0, kv_blocks=4)))
    outcome = simulate(simulation([one], requests((0.0, 30, 10), (0.0, 30, 10))))
    # Both hold 2 of 4 blocks up to 32 tokens. The fourth iteration needs a third for the first: the second gives way
    # with 3 tokens generated, and its 33 tokens, 3 blocks, do not fit beside it. First: 10 s. Then 33 tokens are
    # computed again and yield the fourth token at 11, six more until 17.
    assert first_and_finish(outcome) == [(1.0, 10.0), (1.0, 17.0)]
    assert outcome.requests.preemptions.tolist() == [0, 1]
    assert outcome.peak_kv_blocks.tolist() == [4]
    assert outcome.fleet.preempted_requests.sum() == 1


def test_a_request_that_is_the_latest_itself_gives_way():
    one = instance("i", stage(node(fixed_s=1.0, kv_blocks=3)), max_batched_tokens=40)
    outcome = simulate(simulation([one], requests((0.0, 16, 4), (0.0, 16, 4))))
    # 16 tokens are one block each, the 17th needs another: the first takes the last one, the second has none.
    # First: 1, 2, 3, 4. The second preempts itself at 1, needs 2 blocks for its 17 tokens, and waits for the first.
    assert first_and_finish(outcome) == [(1.0, 4.0), (1.0, 7.0)]
    assert outcome.requests.preemptions.tolist() == [0, 1]


@pytest.mark.parametrize(("reserve", "first_s"), [(True, [3.0, 6.0]), (False, [3.0, 5.0])])
def test_a_prompt_waits_for_room_for_all_of_it_or_just_its_first_chunk(reserve, first_s):
    one = instance("i", stage(node(fixed_s=1.0, kv_blocks=5)), max_batched_tokens=20)
    outcome = simulate(simulation([one], requests((0.0, 48, 1), (0.0, 48, 1)), reserve_full_prompt=reserve))
    # 48 tokens are 3 blocks, chunks of 20, 20, 8. In the third iteration 12 tokens of budget and 2 blocks are left.
    assert outcome.requests.first_token_s.tolist() == first_s


def test_nothing_is_admitted_in_an_iteration_that_had_to_preempt():
    one = instance("i", stage(node(fixed_s=1.0, kv_blocks=3)), max_batched_tokens=10)
    outcome = simulate(simulation([one], requests((0.0, 16, 4), (0.0, 16, 4)), reserve_full_prompt=False))
    # Chunks 10 | 6 + 4 | 1 + 9 | 1 + 3: first tokens at 2 and 4. At 4 the second needs a second block, there is none, it
    # is the latest itself. The first ends at 5; only then 10 and 7 tokens again, second token at 7, last one at 9.
    assert first_and_finish(outcome) == [(2.0, 5.0), (4.0, 9.0)]


def test_what_never_fits_is_refused_and_the_rest_goes_on():
    one = instance("i", stage(node(fixed_s=1.0, kv_blocks=2)))
    outcome = simulate(simulation([one], requests((0.0, 30, 4), (0.0, 30, 3))))
    # 30 + 4 - 1 tokens need a third block, 30 + 3 - 1 do not.
    assert outcome.requests.status.tolist() == [RequestStatus.TOO_LONG, DONE]
    assert first_and_finish(outcome)[1] == (1.0, 3.0)


def test_the_gateway_holds_requests_while_instances_are_full():
    one = instance("i", stage(node(fixed_s=1.0)), max_outstanding_requests=1)
    outcome = simulate(simulation([one], requests((0.0, 1, 2), (0.0, 1, 1))))
    assert first_and_finish(outcome) == [(1.0, 2.0), (3.0, 3.0)]
    assert outcome.fleet.waiting_request_s.sum() == pytest.approx(2.0)
    assert outcome.fleet.max_waiting_requests.tolist() == [[2.0]]


def test_a_longer_prompt_is_turned_away_by_a_shorter_queue():
    model = SimModel(name="m", max_wait_s=2.0, prompt_s=0.5, prompt_token_s=0.01)
    one = instance("i", stage(node(fixed_s=1.0)), weight=1.0, max_running_requests=1)
    asked = requests((0.0, 10, 1), (0.1, 10, 1), (0.2, 51, 1), (0.3, 50, 1), (0.4, 10, 1))
    outcome = simulate(simulation([one], asked, model=model))
    # One waits, so the next does for 1 s: 2 s less 0.5 s and 0.01 s per token leave 51 tokens less than that, 50 just
    # that. Then two wait.
    assert outcome.requests.status.tolist() == [DONE, DONE, REJECTED, DONE, REJECTED]


def test_a_queue_for_decode_turns_requests_away_before_their_prompt():
    prefill = instance("p", stage(node(fixed_s=0.1)), phase=Phase.PREFILL, weight=10.0)
    decode = instance("d", stage(node(fixed_s=10.0)), phase=Phase.DECODE, weight=1.0, max_running_requests=1)
    model = SimModel(name="m", max_handover_s=1.5)
    asked = requests(*[(float(k), 1, 2) for k in range(5)], (21.5, 1, 2))
    outcome = simulate(simulation([prefill, decode], asked, model=model))
    # The first runs from 0.1 until 10.1; at 1 request/s one more may wait, and the next comes while one does.
    assert outcome.requests.status.tolist() == [DONE, DONE, DONE, REJECTED, REJECTED, DONE]
    assert outcome.fleet.max_waiting_requests[0].tolist() == [1.0, 2.0]


def test_too_long_a_queue_turns_requests_away():
    model = SimModel(name="m", max_wait_s=1.0)
    one = instance("i", stage(node(fixed_s=1.0)), weight=2.0, max_running_requests=1)
    outcome = simulate(simulation([one], requests(*[(0.1 * k, 1, 1) for k in range(6)]), model=model))
    # At 2 requests/s two may wait: the first runs at once, three more stand before the sixth (and three wait 1.5 s).
    assert outcome.requests.status.tolist() == [DONE, DONE, DONE, DONE, REJECTED, REJECTED]
    assert outcome.fleet.rejected_requests.sum() == 2
    assert outcome.fleet.arrived_requests.sum() == 6
    assert np.isnan(outcome.requests.first_token_s[5])


def test_the_second_token_comes_a_step_after_the_first_and_never_where_there_is_none():
    one = instance("i", stage(node(fixed_s=1.0)))
    outcome = simulate(simulation([one], requests((0.0, 1, 3), (10.0, 1, 1)), end_s=100.0)).requests
    assert outcome.first_token_s.tolist() == [1.0, 11.0]
    assert outcome.second_token_s.tolist() == pytest.approx([2.0, math.nan], nan_ok=True)
    assert outcome.finish_s.tolist() == [3.0, 11.0]


def test_after_a_hand_over_the_second_token_waits_for_the_step_in_which_the_kv_came():
    """The decode instance steps once a second for the first request; the second one's KV comes in the middle of a step."""
    prefill = instance("p", stage(node(fixed_s=0.5)), phase=Phase.PREFILL)
    decode = instance("d", stage(node(fixed_s=1.0)), phase=Phase.DECODE)
    outcome = simulate(simulation([prefill, decode], requests((0.0, 1, 20), (5.5, 1, 3)), end_s=100.0)).requests
    assert outcome.first_token_s.tolist() == [0.5, 6.0]
    # KV is asked for when the step ends at 6.5, and decoded from the next step on, which begins at 7.5.
    assert outcome.second_token_s.tolist() == [1.5, 8.5]
    assert outcome.finish_s[1] == 9.5
