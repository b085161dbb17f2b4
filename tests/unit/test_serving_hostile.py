"""What hostile or broken peers send the serving parts: each is refused by name, and nothing else suffers."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from coral_core.cli.plan_launch import _places
from coral_core.clock import SystemClock
from coral_core.config.agent import load_agent_file
from coral_core.config.gateway import load_gateway_file, load_keys_file
from coral_core.domain.workload import Phase, Slo
from coral_core.errors import CoralError, InputError, ServingError
from coral_core.serving.admin import checked_token
from coral_core.serving.control.coordinator import _Coordinator
from coral_core.serving.control.curve import KeyPair, read_allowed, read_private
from coral_core.serving.control.held import ControlTerms, Tell
from coral_core.serving.control.instances import Instances
from coral_core.serving.control.messages import PROTOCOL, GarbageError, Refused, from_agent, from_coordinator
from coral_core.serving.control.state_file import alone_in, read_state, restored
from coral_core.serving.gateway import _shaped
from coral_core.serving.refusals import RefusedError
from coral_core.serving.request import TEXT, parse_request
from coral_core.serving.signals import on_signals
from coral_core.serving.sse import BrokenStreamError, EventRelay, read_whole
from coral_core.serving.table import InstanceSpec, ModelTerms, RoutingTable
from coral_core.serving.upstream import UpstreamError, lists_model, new_session, posted
from tests.fakes.control_world import hello

DEEP = b"[" * 5000 + b"]" * 5000
ROW = {
    "instance": "i",
    "phase": "aggregated",
    "stage": "ready",
    "template_id": "t",
    "model": "m",
    "nodes": 1,
    "epoch": 1,
    "region": "local",
    "reason": "",
    "launch_id": "l",
    "url": "http://127.0.0.1:1",
    "weight": 4.0,
    "draining": False,
}


def terms(**changes: float) -> ModelTerms:
    facts = {"mean_input_tokens": 100.0, "mean_output_tokens": 10.0, **changes}
    return ModelTerms(name="m", slo=Slo(ttft_s=1.0, tpot_s=0.1), **facts)


def spec(name: str, weight: float, url: str = "http://127.0.0.1:8000") -> InstanceSpec:
    return InstanceSpec(name=name, model="m", phase=Phase.PREFILL, url=url, weight=weight)


def further_down(levels: int, call):
    return call() if levels == 0 else further_down(levels - 1, call)


def test_a_request_that_can_just_be_read_but_not_written_is_the_clients_fault():
    def deepest() -> bytes:
        """The deepest body that is read here, found from above."""
        for depth in range(1000, 0, -1):
            body = b'{"model":"m","prompt":"x","user":' + b"[" * depth + b"]" * depth + b"}"
            try:
                parse_request(TEXT, body)
            except RefusedError:
                continue
            return body
        raise AssertionError("nothing can be read")

    request = parse_request(TEXT, deepest())
    for write in (request.whole_body, request.prefill_body):
        with pytest.raises(RefusedError, match="nests too deep") as refused:
            further_down(50, write)
        assert refused.value.status == 400


def test_an_engines_nesting_is_a_broken_answer_and_no_bug():
    with pytest.raises(BrokenStreamError, match="no completion"):
        read_whole(b'{"choices":[],"error":' + DEEP + b"}")
    with pytest.raises(BrokenStreamError, match="no piece"):
        EventRelay(passes_usage=False).feed(b'data: {"choices":[],"other":' + DEEP + b"}\n\n")
    assert "refused the request (400)" in msgspec.json.decode(_shaped(DEEP, 400))["error"]["message"]


@pytest.mark.parametrize("weight", [1e-320, 1e-10, 1e16, 1e308])
def test_a_weight_that_cannot_be_routed_by_leaves_the_others_alone(weight):
    table = RoutingTable([terms()])
    table.register(spec("a", 1.0))
    with pytest.raises(InputError, match="is no weight: 0, or its throughput"):
        table.register(spec("b", weight))
    with pytest.raises(InputError, match=r"a\.weight"):
        table.set_weight("a", weight)
    with pytest.raises(InputError, match=r"a\.weight_frac"):
        table.report("a", ready=True, weight_frac=1e-320)
    assert [(one.spec.name, one.weight) for one in table.members] == [("a", 1.0)]
    table.register(spec("c", 0.0))


@pytest.mark.parametrize("tokens", [1e-320, 1e300, float("nan")])
def test_mean_lengths_that_no_requests_have_are_refused(tokens):
    for what in ("mean_input_tokens", "mean_output_tokens"):
        with pytest.raises(InputError, match=rf"m\.{what}: must be from"):
            terms(**{what: tokens})


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:0", "http://h:99999", "http://[[:::", "http://:80", "http://h:80:80"]
)
def test_an_address_that_nobody_can_have_is_refused(url):
    with pytest.raises(InputError, match="is no address"):
        spec("a", 1.0, url)
    assert spec("a", 1.0, "http://[::1]:80").url == "http://[::1]:80"


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": "x"},
        {"nodes": 0},
        {"nodes": 10**9},
        {"instance": []},
        {"instance": ""},
        {"weight": "much"},
        {"weight": -1.0},
        {"lost_nodes": None},
        {"weight_frac": 2.0},
        {"draining": "no"},
        {"stage": "elsewhere"},
        {"url": 5},
    ],
)
def test_a_state_with_wrong_values_is_damaged_whatever_they_are(change):
    assert len(restored({"instances": [ROW]}, 0.0)) == 1
    with pytest.raises(ServingError, match="damaged"):
        restored({"instances": [{**ROW, **change}]}, 0.0)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b'{"format": 99}', b'{"a":' + b"[" * 100_000, b"null"])
def test_a_state_file_that_is_none_is_told_apart_by_its_path(tmp_path, text):
    (tmp_path / "state.json").write_bytes(text)
    with pytest.raises(CoralError, match=r"state\.json"):
        read_state(tmp_path)


@pytest.mark.parametrize("document", [{}, {"instances": None}, {"instances": [5]}])
def test_a_state_without_rows_is_damaged(document):
    with pytest.raises(ServingError, match="damaged"):
        restored(document, 0.0)


@pytest.mark.parametrize("token", ["short", "a" * 40 + "\n" + "b" * 40, "a" * 40 + " b", "\u00e4" * 40])
def test_a_token_that_no_header_can_carry_is_refused(token):
    with pytest.raises(InputError, match="the admin token"):
        checked_token(token)
    assert checked_token("a" * 32) == "a" * 32


def test_two_listeners_need_two_ports(tmp_path):
    text = """
listen: {host: 127.0.0.1, port: PORT}
admin: {port: PORT, token_file: t}
models: [{name: m, slo: {ttft_s: 1.0, tpot_s: 0.1}, mean_input_tokens: 9.0, mean_output_tokens: 9.0}]
"""
    path = tmp_path / "gateway.yaml"
    path.write_text(text.replace("PORT", "8000"), encoding="utf-8")
    with pytest.raises(InputError, match="the same port 8000"):
        load_gateway_file(path)
    path.write_text(text.replace("PORT", "0"), encoding="utf-8")
    assert load_gateway_file(path).listen.port == 0


@pytest.mark.parametrize("limit", ["probe_s: 1.0e-300", "stall_s: 1.0e+300", "drain_s: .nan", "retry_after_s: 0.0"])
def test_limits_that_would_spin_or_never_end_are_refused(tmp_path, limit):
    path = tmp_path / "gateway.yaml"
    path.write_text(
        "listen: {host: 127.0.0.1, port: 0}\n"
        "models: [{name: m, slo: {ttft_s: 1.0, tpot_s: 0.1}, mean_input_tokens: 9.0, mean_output_tokens: 9.0}]\n"
        f"limits: {{{limit}}}\n",
        encoding="utf-8",
    )
    with pytest.raises(InputError, match=rf"gateway\.yaml:3: `limits\.{limit.partition(':')[0]}`"):
        load_gateway_file(path)


def test_a_rate_after_which_nobody_could_wait_is_refused(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: [{{name: a, hash: 'sha256:{'0' * 64}', requests_per_s: 1.0e-320}}]\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"keys\[0\]\.requests_per_s"):
        load_keys_file(path)


def test_a_lost_terminal_asks_to_end_and_nohup_is_respected():
    async def asked(*, within_s: float) -> bool:
        first = asyncio.Event()
        with on_signals(first):
            os.kill(os.getpid(), signal.SIGHUP)
            try:
                await asyncio.wait_for(first.wait(), within_s)
            except TimeoutError:
                return False
            return True

    assert asyncio.run(asked(within_s=120.0))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert not asyncio.run(asked(within_s=0.1))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("endless", [b"\x91" * 200_000, b"\x81\xa1a" * 80_000])
def test_a_message_that_nests_without_end_is_garbage(endless):
    for payload in (endless, b"\x83\xa4type\xa9heartbeat\xa1z" + endless):
        for read in (from_agent, from_coordinator):
            with pytest.raises(GarbageError):
                read([PROTOCOL, payload[: 256 * 1024]])


def test_forty_characters_that_are_no_key_are_refused_before_zeromq_sees_them(tmp_path):
    right, wrong = "0" * 40, "0" * 35 + "#" * 5
    for name in ("public", "secret", "server"):
        with pytest.raises(InputError, match=f"{name}: is no CURVE key"):
            KeyPair(**{"public": right, "secret": right, "server": right, name: wrong})
    path = tmp_path / "agents.allowed"
    path.write_text(f"a {right}\nb {wrong}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"agents\.allowed:2"):
        read_allowed(path)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "5", "[]", '{"public": 1, "secret": 2}', '{"public": "x"}'])
def test_a_keys_file_that_is_none_is_told_by_its_path(tmp_path, text):
    path = tmp_path / "agent.keys"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(InputError, match=r"agent\.keys"):
        read_private(path)


@pytest.mark.parametrize("port", [0, 65536, 99999])
def test_an_agent_is_not_sent_to_a_port_that_is_none(tmp_path, port):
    path = tmp_path / "agent.yaml"
    path.write_text(json.dumps({"coordinator": f"tcp://h:{port}", "keys_file": "k", "metadata": {}}), encoding="utf-8")
    with pytest.raises(InputError, match="a port that is none"):
        load_agent_file(path)


@pytest.mark.parametrize("name", ["", "a/../b", "\u00e4", "a b", "x" * 129, "x\n"])
def test_an_instance_that_the_gateway_could_not_name_is_refused_before_it_starts_an_engine(name):
    instances = Instances(ControlTerms(), name="c")
    [told] = instances.hello(b"1", "key", hello(name), 0.0)
    assert isinstance(told, Tell)
    assert isinstance(told.message, Refused)
    assert "is no name of an instance" in told.message.reason
    assert not instances.held


def test_a_state_that_cannot_be_written_down_is_told_once_and_when_it_can_again(tmp_path):
    told: list[str] = []
    folder = tmp_path / "state"
    folder.write_text("in the way", encoding="utf-8")
    plan = SimpleNamespace(folder=folder, gateway_url="", terms=ControlTerms(), allowed=SimpleNamespace(trouble=""))
    end = SimpleNamespace(endpoint="tcp://h:1", refused_keys=0, dropped=0)
    one = _Coordinator(plan, SystemClock(), end, SimpleNamespace(), lambda _event, text, **_: told.append(text))
    told.clear()
    one._write()
    one._write()
    assert len(told) == 1
    assert "cannot write down the state" in told[0]
    folder.unlink()
    one._write()
    one._write()
    assert told[1:] == ["the state is written down again"]
    assert read_state(folder)["instances"] == []


def test_one_coordinator_has_a_folder_at_a_time(tmp_path):
    with (
        alone_in(tmp_path / "state", "coordinator"),
        pytest.raises(ServingError, match="another coordinator runs here"),
        alone_in(tmp_path / "state", "coordinator"),
    ):
        pass
    (tmp_path / "file").write_text("", encoding="utf-8")
    with (
        alone_in(tmp_path / "state", "coordinator"),
        alone_in(tmp_path / "file", "coordinator"),
    ):  # nothing can be kept there, which is told elsewhere
        pass


def test_no_engine_is_gone_because_the_gateway_can_open_no_more_files():
    async def ask() -> UpstreamError:
        async with new_session(connect_s=60.0) as session:
            assert await lists_model(session, "http://127.0.0.1:9", "m", timeout_s=60.0) is False
            taken, limits = [], resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
            try:
                with pytest.raises(OSError, match="Too many open files"):
                    taken.extend(iter(lambda: os.dup(2), None))
                assert await lists_model(session, "http://127.0.0.1:9", "m", timeout_s=60.0) is None
                with pytest.raises(UpstreamError, match="no more connections to give") as failed:
                    async with posted(session, "http://127.0.0.1:9", b"{}", "x"):
                        pass
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for one in taken:
                    os.close(one)
            return failed.value

    failed = asyncio.run(ask())
    assert (failed.gone, failed.cause) == (False, "busy")


def test_a_gateway_takes_as_many_open_files_as_it_may_have():
    code = (
        "import resource as r\nfrom coral_core.serving.listener import run_loop\n"
        "most = r.getrlimit(r.RLIMIT_NOFILE)[1]\nr.setrlimit(r.RLIMIT_NOFILE, (64, most))\n"
        "async def main(): assert r.getrlimit(r.RLIMIT_NOFILE) == (most, most)\n"
        "run_loop(main())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("where", ["full", "closed", "letters"])
def test_whoever_serves_serves_on_where_nobody_can_be_told(where, as_json):
    """A full disk, a reader that has gone, a terminal without such letters."""
    code = (
        "import os\nfrom coral_core.cli.serve_extra import Teller\n"
        f"say = Teller(as_json={as_json})\n"
        "for _ in range(3):\n    say('event', 'ein Ger\\u00e4t')\n"
        "os._exit(0)"
    )
    read, write = os.pipe()
    os.close(read)
    with Path("/dev/full").open("wb") as full:
        out = {"full": full.fileno(), "closed": write, "letters": subprocess.DEVNULL}[where]
        env = {**os.environ, "PYTHONIOENCODING": "ascii"} if where == "letters" else None
        done = subprocess.run([sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE, env=env, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_first_start_of_a_coordinator_is_nothing_wrong(tmp_path):
    told: list[str] = []
    plan = SimpleNamespace(folder=tmp_path / "state", gateway_url="", terms=ControlTerms())
    _Coordinator(plan, SystemClock(), SimpleNamespace(), SimpleNamespace(), lambda _event, text, **_: told.append(text))
    assert told == [f"the first start in {tmp_path / 'state'}: nothing to take over"]


@pytest.mark.parametrize("host", ["", "a b/..", "--trust-remote-code", "http://h", "h:80", "[::1]", "x\n"])
def test_commands_are_not_shown_for_an_address_that_is_none(host):
    stages = [{"nodes": ["c", "c"]}]
    with pytest.raises(InputError, match=r"--host: .* is no address"):
        _places(stages, [host], 8000)
    for right in ("::1", "10.0.0.1", "node-1.local"):
        assert [place.host for place in _places(stages, [right], 8000)] == [right, right]
