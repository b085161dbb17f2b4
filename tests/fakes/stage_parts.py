"""Parts of the stage runtime without an engine, for `stage_driver`: what they do where nodes, ranks and strangers misbehave."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import zmq
from vllm.distributed import parallel_state
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput

from coral_core.engine.plugin import stage_rank
from coral_core.engine.plugin.kv_scheduler import Fetch, Grant, StepMetadata
from coral_core.engine.plugin.stage_layout import BlockPools, Layout, Node, Stage
from coral_core.engine.plugin.stage_node import StageNode
from coral_core.engine.plugin.stage_pipeline import Outcome, Pipeline
from coral_core.engine.plugin.stage_rank import Rank, Ranks
from coral_core.engine.plugin.stage_scheduler import StageScheduler
from coral_core.engine.plugin.stage_wire import Hub, Wire

PATIENT_S = 60.0


class SilentHub:
    """Sends nothing; `events` are what the test puts there."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sent: list[Any] = []

    def send(self, *message: object) -> None:
        self.sent.append(message)


def pipeline_of(*stages: str, step_timeout_s: float = PATIENT_S) -> tuple[Pipeline, SilentHub]:
    """One node for each letter."""
    layout = Layout(
        stages=tuple(Stage(layers=1, nodes=tuple(Node(name=name, local=True) for name in stage)) for stage in stages)
    )
    hub = SilentHub()
    pipeline = Pipeline(layout, hub, step_timeout_s)
    pipeline.pools = BlockPools({node.name: 9 for node in layout.nodes})
    return pipeline, hub


def step_of(*, tokens: int = 0, ended: bool = False, metadata: StepMetadata | None = None) -> SchedulerOutput:
    """Of the one request `r`."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {"r": tokens} if tokens else {}
    output.finished_req_ids = {"r"} if ended else set()
    output.kv_connector_metadata = metadata
    return output


def two_lost_one_after_the_other() -> None:
    """The second had not yet dropped what the first took with it: nothing of that is a KV transfer that has ended."""
    pipeline, hub = pipeline_of("ab", "cd")
    path = pipeline.bindings.bind("r")
    pipeline.pools.grow("r", path, 2)
    pipeline.dispatch([(path, step_of(tokens=4))], {})
    hub.events.put((path[0], ("lost", "gone")))
    assert set(pipeline.wait().lost) == {"r"}
    pipeline.release("r")
    pipeline.dispatch([(path, step_of(ended=True))], {})
    hub.events.put((path[1], ("lost", "gone")))
    assert pipeline.wait().kv_connector_output is None
    assert pipeline.pools.in_use() == dict.fromkeys("abcd", 0)


def transfers_whose_only_holder_is_lost() -> None:
    """They have ended: nobody is there who could say so."""
    for field, metadata in (
        ("finished_sending", StepMetadata(grants={"r": Grant(lease="1", block_ids=[1], tokens=4)})),
        ("finished_recving", StepMetadata(fetches={"r": Fetch(first=0, last=4, block_ids=[1])})),
    ):
        for early in (False, True):  # lost before the nodes hear of the transfer, or after
            pipeline, hub = pipeline_of("ab")
            path = pipeline.bindings.bind("r")
            pipeline.pools.grow("r", path, 1)
            hub.events.put((path[0], ("lost", "gone")))
            if early:
                pipeline.wait()
            pipeline.dispatch([(path, step_of(metadata=metadata))], {})
            output = pipeline.wait().kv_connector_output
            assert getattr(output, field) == {"r"}, (field, early, output)
            assert pipeline.wait().kv_connector_output is None  # told once


def a_node_lost_while_nobody_is_served() -> None:
    """Whoever comes next is not bound to it."""
    pipeline, hub = pipeline_of("ab", "c")
    hub.events.put(("a", ("lost", "gone")))
    scheduler = StageScheduler.__new__(StageScheduler)
    scheduler.pipeline = pipeline
    scheduler._turn, scheduler.running, scheduler.kv_holding_waiting = 0, [], []
    scheduler.waiting = [SimpleNamespace(request_id="r")]
    scheduler._schedule_path = lambda _path, **_: step_of()
    assert [path for path, _ in scheduler.schedule().steps] == [("b", "c")]


def a_path_that_waits() -> None:
    """Its nodes hear nothing."""
    pipeline, hub = pipeline_of("ab", "c")
    pipeline.dispatch([(pipeline.bindings.bind("r"), step_of())], {})
    assert hub.sent == []


def a_step_that_never_comes_back() -> None:
    """The engine ends after it, though steps of other nodes come back all the time."""
    pipeline, hub = pipeline_of("ab", "cd", step_timeout_s=0.5)
    path = pipeline.bindings.bind("r")
    pipeline.dispatch([(path, step_of(tokens=4))], {})
    began, error = time.monotonic(), ""
    while not error and time.monotonic() - began < PATIENT_S:
        time.sleep(0.1)
        hub.events.put(("d", ("done", [], ModelRunnerOutput(req_ids=[], req_id_to_index={}))))
        try:
            pipeline.wait()
        except TimeoutError as found:
            error = str(found)
    assert f"from nodes {', '.join(path)}, though others do" in error
    assert time.monotonic() - began > 3.0, error


def statistics_of_several_parts() -> None:
    """They are made once for all that came back: making them takes what was counted, and only the newest is told."""
    made: list[int] = []

    def stats_of(_self: object) -> SchedulerStats:
        made.append(len(made) + 1)
        return SchedulerStats(num_running_reqs=made[-1])

    def updated(self: StageScheduler, _step: object, _result: object) -> dict[int, EngineCoreOutputs]:
        return {0: EngineCoreOutputs(scheduler_stats=self.make_stats())}

    scheduler = StageScheduler.__new__(StageScheduler)
    scheduler._late_blocks = {}
    result = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    outcome = Outcome(req_ids=[], req_id_to_index={}, parts=[({}, result), ({}, result)])
    with patch.object(Scheduler, "make_stats", stats_of), patch.object(Scheduler, "update_from_output", updated):
        told = scheduler.update_from_output(step_of(), outcome)
    assert (made, told[0].scheduler_stats.num_running_reqs) == ([1], 1)


def two_questions_after_a_loss() -> None:
    """A node that was lost during the first is not waited for in the second."""
    pipeline, hub = pipeline_of("ab")
    for event in (("a", ("lost", "gone")), ("b", ("reply", 1)), ("b", ("reply", 2))):
        hub.events.put(event)
    assert pipeline.ask(["a", "b"], "hops", timeout_s=PATIENT_S) == [1]
    assert pipeline.ask(["a", "b"], "hops", timeout_s=5.0) == [2]


def a_stranger_with_any_name() -> None:
    """A peer whose name is no text does not end the thread that hears the nodes."""
    hub = Hub(host="127.0.0.1", port=0, keys=None, nodes=["n"], silence_s=PATIENT_S, on_lost=lambda *_: None)
    wire = Wire(None)
    stranger = wire.connected(zmq.DEALER, hub.address, b"\xff\xfe")
    stranger.send(b"hello")
    time.sleep(1.0)
    node = wire.connected(zmq.DEALER, hub.address, b"n")
    node.send(b"\x80\x05)\x85.")  # (()), pickled
    assert hub.events.get(timeout=PATIENT_S)[0] == "n"
    hub.close()


def a_connection_that_idles() -> None:
    """The kernel keeps it alive, at both ends."""
    wire = Wire(None)
    pull, address = wire.bound(zmq.PULL, "127.0.0.1", 0)
    push = wire.connected(zmq.PUSH, address)
    push.send(b"")
    pull.recv()
    port = f":{int(address.rpartition(':')[2]):04X}"
    until = time.monotonic() + PATIENT_S
    timers: list[str] = []
    while timers != ["02", "02"] and time.monotonic() < until:  # 01 until what was sent is acknowledged
        time.sleep(0.1)
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        timers = [row[5][:2] for row in rows if row[3] == "01" and (port in row[1] or port in row[2])]
    assert timers == ["02", "02"], timers


def a_rank_that_ends() -> None:
    """The process of another rank ends after it."""
    if not (leader := os.fork()):
        follower = subprocess.Popen(["sleep", "600"])
        threading.Thread(target=stage_rank.end_after, args=(follower, 1), daemon=True).start()
        follower.kill()
        time.sleep(PATIENT_S)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1]) == 1


@contextmanager
def rank_of_two(number: int, rendezvous: Path) -> Iterator[Rank]:
    """A rank whose worker, as on a GPU, measures its memory with all ranks of the node."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=number, world_size=2)
    group = torch.distributed.group.WORLD

    def broadcast(given: Any, src: int) -> Any:
        held = [given]
        torch.distributed.broadcast_object_list(held, src)
        return held[0]

    parallel_state.get_tp_group = lambda: SimpleNamespace(broadcast_object=broadcast, cpu_group=group)
    stage_rank.get_kv_cache_configs = lambda _config, _specs, free: [SimpleNamespace(num_blocks=free[0])]
    rank = Rank.__new__(Rank)
    rank._config, rank._seat = None, SimpleNamespace(node=Node(name="n", tp=2))
    rank._wrapper = SimpleNamespace(initialize_from_config=lambda _: None)

    def call(method: str, _args: object, _kwargs: object) -> Any:
        if method == "determine_available_memory":
            torch.distributed.barrier()
            return 100 - number
        return {}

    rank.call = call
    yield rank
    torch.distributed.destroy_process_group()


def memory_of_two_ranks() -> None:
    """All ranks of a node measure it, and its KV cache fits into the least."""
    rendezvous = Path(os.environ["STAGE_DRIVER_FOLDER"]) / "rendezvous"
    if not (follower := os.fork()):
        try:
            with rank_of_two(1, rendezvous) as rank:
                for _ in range(2):
                    command, payload = parallel_state.get_tp_group().broadcast_object(None, src=0)
                    getattr(rank, command)(*payload)
        finally:
            os._exit(0)
    said: list[Any] = []
    node = StageNode.__new__(StageNode)
    node._link = SimpleNamespace(send=lambda *message: said.append(message))
    node._ranks = Ranks.__new__(Ranks)
    with rank_of_two(0, rendezvous) as node._ranks.lead:
        node._ranks._followers = [follower]
        node._on_cache(SimpleNamespace(kv_cache_layout=None, hash_block_size=1, cache_hit_alignment_tokens=1))
        assert said == [("reply", 99)]
        os.waitpid(follower, 0)


def parts(_model: str, _port: int) -> dict[str, Any]:
    """What is wrong with each, in which anything is."""
    checks: tuple[Callable[[], None], ...] = (
        memory_of_two_ranks,  # this and the next fork, hence before this process has threads
        a_rank_that_ends,
        two_lost_one_after_the_other,
        transfers_whose_only_holder_is_lost,
        a_node_lost_while_nobody_is_served,
        a_path_that_waits,
        a_step_that_never_comes_back,
        statistics_of_several_parts,
        two_questions_after_a_loss,
        a_stranger_with_any_name,
        a_connection_that_idles,
    )
    wrong = {}
    for check in checks:
        try:
            check()
        except Exception:  # noqa: BLE001 - the others are to be seen as well
            wrong[check.__name__] = traceback.format_exc()
    return {"wrong": wrong}
