"""`coral gateway` as a process: its files, its addresses, signals, and what it says of mistakes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
import yaml

from coral_core.cli.entry import run
from coral_core.clock import SystemClock
from coral_core.forecast import DemandSample
from tests.fakes.fake_engine import FakeEngine, fake_engine
from tests.fakes.gateway_case import CHAT, MODEL, TOKEN, chat, events_in, spoken
from tests.fakes.waiting import PATIENT_S

ROOT = Path(__file__).resolve().parents[2]


def files(folder: Path, engine_url: str, **changes: object) -> Path:
    (folder / "token").write_text(TOKEN, encoding="utf-8")
    document = {
        "listen": {"port": 0},
        "admin": {"port": 0, "token_file": "token"},
        "keys_file": "keys.yaml",
        "limits": {"drain_s": 60.0},
        "models": [
            {
                "name": MODEL,
                "slo": {"ttft_s": 5.0, "tpot_s": 1.0},
                "mean_input_tokens": 10.0,
                "mean_output_tokens": 10.0,
            }
        ],
        "instances": [{"name": "a", "model": MODEL, "phase": "aggregated", "url": engine_url, "weight": 5.0}],
        **changes,
    }
    path = folder / "gateway.yaml"
    path.write_text(json.dumps(document, indent=2), encoding="utf-8")
    return path


def new_key(capsys, folder: Path) -> str:
    """A key whose hash is in the keys file."""
    assert run(["gateway", "hash-key", "--new", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    keys = {"keys": [{"name": "one", "hash": made["hash"], "concurrent_requests": 4}]}
    (folder / "keys.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    return made["key"]


async def draining(session: aiohttp.ClientSession, url: str) -> None:
    """Returns once the gateway says so or takes no connections any more."""
    with contextlib.suppress(aiohttp.ClientError):
        status = 200
        while status != 503:
            await asyncio.sleep(0.05)
            async with session.get(url + "/health") as response:
                status = response.status


@pytest.mark.servers
@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_lets_what_runs_finish_and_a_second_one_does_not(tmp_path, capsys, signals):
    key = new_key(capsys, tmp_path)
    environment = {"CORAL_STORE": (tmp_path / "store").as_uri(), "PATH": "/usr/bin:/bin"}

    async def go(engine: FakeEngine):
        path = files(tmp_path, engine.url, record_demand=True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from coral_core.cli.entry import main; main()"),
            *("gateway", "run", "--config", str(path), "--json"),
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
        )
        try:
            said = json.loads(await asyncio.wait_for(process.stdout.readline(), PATIENT_S))
            assert (said["event"], said["ready"], said["not_ready"]) == ("started", ["a"], [])
            headers = {"Authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                async with session.post(said["url"] + CHAT, json=chat()) as answered:
                    assert answered.status == 200
                engine.tell(tokens=8 if signals == 1 else 1000, pause_s=0.25)
                async with session.post(said["url"] + CHAT, json=chat(stream=True)) as response:
                    first = await response.content.readany()
                    for _ in range(signals):
                        process.send_signal(signal.SIGTERM)
                        await draining(session, said["url"])  # else two signals may be one
                    events = events_in(first + await response.read())
            if signals == 1:
                assert spoken(events) == "".join(f"t{n} " for n in range(8))
            else:
                assert events[-1]["error"]["code"] == "gateway_unavailable"
            assert await asyncio.wait_for(process.wait(), PATIENT_S) == 0
            assert json.loads(await process.stdout.readline()) == {"event": "stopped"}
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def with_engine():
        async with fake_engine("a", MODEL) as engine:
            await go(engine)

    asyncio.run(with_engine())
    [told] = (tmp_path / "store" / "demand").rglob("*-gateway-*.jsonl")
    assert json.loads(told.read_text(encoding="utf-8").splitlines()[0])["model"] == MODEL


def test_what_is_wrong_with_the_files_is_told_with_its_line(tmp_path, capsys):
    new_key(capsys, tmp_path)
    path = files(tmp_path, "http://127.0.0.1:9")
    assert run(["gateway", "run", "--config", str(path), "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"models": [MODEL], "instances": ["a"], "keys": True}
    assert run(["gateway", "run", "--config", str(path), "--check"]) == 0
    assert "is right: 1 model on 1 instance" in capsys.readouterr().out
    instance = {"name": "a", "model": MODEL, "phase": "aggregated", "url": "http://h:1", "weight": 5.0}
    slo = {"ttft_s": 5.0, "tpot_s": 1.0}
    model = {"name": MODEL, "slo": slo, "mean_input_tokens": 1.0, "mean_output_tokens": 1.0}
    wrong = [
        ({"listen": {"port": 0, "prot": 1}}, "unknown key"),
        ({"listen": {"port": 70000}}, "`listen.port`"),
        ({"listen": {"port": 0, "host": "0.0.0.0"}, "keys_file": None}, "without a keys_file anybody could ask"),
        ({"admin": {"port": 0, "host": "0.0.0.0", "token_file": "token"}}, "loopback only"),
        ({"admin": {"port": 0, "token_file": "none"}}, "cannot read the admin token"),
        ({"admin": {"port": 0, "token_file": "short"}}, "less than 32 characters (make one"),
        ({"keys_file": "none.yaml"}, "none.yaml"),
        ({"instances": [instance, dict(instance)]}, "gateway.yaml: instances has a more than once"),
        ({"instances": [{**instance, "model": "other"}]}, "which models lacks"),
        ({"instances": [{**instance, "url": "http://h:1/v1"}]}, "`instances[0].url`"),
        ({"instances": [{**instance, "weight": -1.0}]}, "`instances[0].weight`"),
        ({"models": []}, "`models`"),
        ({"models": [{**model, "slo": {**slo, "ttft_s": 0.0}}]}, "`models[0].slo.ttft_s`"),
        ({"limits": {"stall_s": 0.0}}, "`limits.stall_s`"),
    ]
    (tmp_path / "short").write_text("short", encoding="utf-8")
    for change, complaint in wrong:
        path = files(tmp_path, "http://127.0.0.1:9", **change)
        assert run(["gateway", "run", "--config", str(path), "--check"]) == 2, change
        assert complaint in capsys.readouterr().err
    entry = {"name": "x", "hash": "sha256:" + "0" * 64}
    for keys, complaint in (
        ([{**entry, "hash": "secret"}], "`keys[0].hash`"),
        ([entry, dict(entry)], "same name"),
        ([entry, {**entry, "name": "y"}], "x and y have the same hash"),
    ):
        (tmp_path / "keys.yaml").write_text(json.dumps({"keys": keys}, indent=2), encoding="utf-8")
        path = files(tmp_path, "http://127.0.0.1:9")
        assert run(["gateway", "run", "--config", str(path), "--check"]) == 2
        assert complaint in capsys.readouterr().err


def test_keys_are_made_and_hashed(capsys, monkeypatch):
    import io

    assert run(["gateway", "hash-key", "--new"]) == 0
    key, found = (line.split()[1] for line in capsys.readouterr().out.splitlines()[:2])
    monkeypatch.setattr(sys, "stdin", io.StringIO(key + "\n"))
    assert run(["gateway", "hash-key"]) == 0
    assert capsys.readouterr().out.strip() == found
    for bad in ("short", "a" * 40, "", "with a blank in the middle of the key itself"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(bad))
        assert run(["gateway", "hash-key"]) == 2
        assert "key" in capsys.readouterr().err


def test_what_it_says_when_it_has_started_and_ended(tmp_path, capsys, monkeypatch):
    path = files(tmp_path, "http://127.0.0.1:9", keys_file=None)

    async def briefly(plan, public, admin, _clock, *, started):
        from coral_core.serving.run import new_gateway

        started(new_gateway(plan, None, SystemClock()))
        public.close()
        admin.close()

    monkeypatch.setattr("coral_core.serving.run.serve", briefly)
    assert run(["gateway", "run", "--config", str(path)]) == 0
    said = capsys.readouterr()
    assert "serving on http://127.0.0.1:" in said.out
    assert "ready: none; a not yet" in said.out
    assert "stopped" in said.out
    assert "anybody on this machine may ask" in said.err
    assert run(["gateway", "run", "--config", str(path), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["event"], line.get("not_ready")) for line in lines] == [("started", ["a"]), ("stopped", None)]


def test_an_address_that_is_taken_is_told(tmp_path, capsys):
    from coral_core.serving.listener import bound_socket

    with bound_socket("127.0.0.1", 0) as taken:
        path = files(tmp_path, "http://h:9", keys_file=None, listen={"port": taken.getsockname()[1]})
        assert run(["gateway", "run", "--config", str(path)]) == 8
    assert "cannot listen" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("coral_core.cli.gateway._NEEDED", ("no_such_library",))
    assert run(["gateway", "hash-key", "--new"]) == 2
    assert "coral-serve[serve]" in capsys.readouterr().err


def test_demand_goes_to_the_fleets_place_in_the_store(tmp_path, monkeypatch):
    from coral_core.cli.gateway import _sink

    monkeypatch.setenv("CORAL_FLEET", "demo")
    _sink((tmp_path / "store").as_uri())([DemandSample(time_s=1e9, duration_s=60.0, model="m", requests_per_s=1.0)])
    assert [path.parent.parent.name for path in (tmp_path / "store").rglob("*-gateway-*.jsonl")] == ["demo"]


def test_the_documented_files_are_right(tmp_path, capsys):
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    for name, file in (("gateway", "gateway.yaml"), ("keys", "keys.yaml")):
        [block] = re.findall(rf"<!-- {name} file -->\n```yaml\n(.*?)```", text, re.DOTALL)
        (tmp_path / file).write_text(block, encoding="utf-8")
    (tmp_path / "admin.token").write_text(TOKEN, encoding="utf-8")
    store = (tmp_path / "store").as_uri()
    assert run(["gateway", "run", "--config", str(tmp_path / "gateway.yaml"), "--check", "--store", store]) == 0
    assert "1 model on 3 instances" in capsys.readouterr().out
