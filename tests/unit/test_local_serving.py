"""Serving on this machine, without engines: the files agree with their readers, and nothing outlives its maker."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from coral_core.cli.entry import run
from coral_core.config.coordinator import load_coordinator_file
from coral_core.config.engine import load_engine_file
from coral_core.config.gateway import load_gateway_file
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.config.settings import Settings
from coral_core.errors import InputError, ServingError
from coral_core.serving.control.curve import read_allowed, read_private
from tasks.local_serving import (
    MARK,
    ROOT,
    Programs,
    answers,
    end_serving,
    free_ports,
    guarded,
    make_tiny_models,
    require_free,
    serving_processes,
    write_serving,
)
from tests.fakes.waiting import PATIENT_S, until

MODELS = {"tiny-chat": Path("/models/a"), "tiny-split": Path("/models/b")}


def written(folder: Path, **changes):
    values = {"models": MODELS, "interpreter": Path("/engine/python"), "store_url": "file:///store", **changes}
    return write_serving(resolve_scenario(load_scenario("local")), "local", folder, **values)


def test_every_file_is_what_its_reader_takes_and_all_agree(tmp_path):
    serving = written(tmp_path, port=8765, gateway_limits={"probe_s": 1.0}, environment={"CORAL_FLEET": "mine"})
    gateway = load_gateway_file(serving.gateway_file)
    assert (gateway.listen.port, serving.gateway_url) == (8765, "http://127.0.0.1:8765")
    assert gateway.limits.probe_s == 1.0
    assert [model.name for model in gateway.models] == ["tiny-chat", "tiny-split"]
    assert gateway.models[0].slo.tpot_s == 0.5
    coordinator = load_coordinator_file(serving.coordinator_file)
    assert coordinator.gateway.url == serving.admin_url == f"http://127.0.0.1:{gateway.admin.port}"
    assert coordinator.gateway.token_file == gateway.admin.token_file
    assert len(gateway.admin.token_file.read_text().strip()) >= 32
    assert gateway.admin.token_file.stat().st_mode & 0o077 == 0
    terms = load_engine_file(coordinator.engine_file)
    assert {name: model.path for name, model in terms.models.items()} == {
        ("tiny-chat", "fp32"): "/models/a",
        ("tiny-split", "fp32"): "/models/b",
    }
    agent = read_private(Path(serving.environment["CORAL_LOCAL_AGENT_KEYS"]))
    assert agent.server == read_private(coordinator.keys_file).public
    assert read_allowed(coordinator.agents_file) == {agent.public: "local"}
    settings = Settings(**{name.removeprefix("CORAL_").lower(): value for name, value in serving.environment.items()})
    assert (settings.provider, settings.fleet) == ("local", "mine")
    assert settings.local_coordinator == f"tcp://127.0.0.1:{coordinator.listen.port}"
    with pytest.raises(InputError, match="is there already"):
        written(tmp_path)


def test_a_model_that_was_not_made_is_named(tmp_path):
    with pytest.raises(InputError, match="tiny-split is not among those made here"):
        written(tmp_path, models={"tiny-chat": Path("/models/a")})


def test_models_are_made_once_and_a_failing_interpreter_is_named(tmp_path):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/asked"\nmkdir -p "$3" && echo {} > "$3/config.json"\n')
    program.chmod(0o755)
    found = make_tiny_models(tmp_path / "models", program)
    assert make_tiny_models(tmp_path / "models", program) == found
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2
    assert "--hidden 192 --heads 6" in asked[1]
    assert "--seed 1" in asked[1]
    program.write_text("#!/bin/sh\necho no module named torch >&2; exit 1\n")
    with pytest.raises(ServingError, match=r"tiny-chat could not be made: no module named torch .*make engine-cpu"):
        make_tiny_models(tmp_path / "others", program)


def test_programs_are_awaited_told_of_and_ended(tmp_path):
    with Programs(serving=written(tmp_path)) as programs:
        programs.serving.gateway_file.write_text("{}")
        with pytest.raises(ServingError, match=r"the gateway did not start: .*listen"):
            programs.start_gateway()
        assert serving_processes(tmp_path) == 0
    assert programs.running == {}


def test_ports_are_free_and_one_that_is_taken_is_named():
    ports = free_ports(3)
    assert len(set(ports)) == 3
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port {taken} is taken"):
            require_free(taken)
        assert not answers(f"http://127.0.0.1:{ports[0]}/health")
    require_free(ports[0])


def marked_sleep(folder: Path, seconds: int = 600) -> subprocess.Popen:
    return subprocess.Popen(["sleep", str(seconds)], env={**os.environ, MARK: str(folder)}, start_new_session=True)


def test_what_is_left_ends_with_the_guarded_block_and_what_was_left_before_it(tmp_path):
    with marked_sleep(tmp_path) as before, marked_sleep(tmp_path / "other") as other:
        try:
            with guarded(tmp_path):
                assert before.wait(timeout=PATIENT_S) == -signal.SIGKILL
                during = marked_sleep(tmp_path)
                assert serving_processes(tmp_path) == 1
            assert during.wait(timeout=PATIENT_S) == -signal.SIGKILL
            assert end_serving(str(tmp_path)) == 0
            assert other.poll() is None
        finally:
            other.kill()


def test_what_is_left_ends_also_when_its_maker_is_killed(tmp_path):
    maker = (
        "import os, pathlib, subprocess, sys, time\n"
        "from tasks.local_serving import MARK, guarded\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "with guarded(folder):\n"
        "    subprocess.Popen(['sleep', '600'], env={**os.environ, MARK: str(folder)}, start_new_session=True)\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", maker], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        assert serving_processes(tmp_path) == 1
        process.kill()
    until(lambda: serving_processes(tmp_path) == 0)


def test_this_machine_is_not_asked_by_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert answers(f"http://127.0.0.1:{server.server_address[1]}/")
        server.shutdown()


# The demo ----------------------------------------------------------------------------------------------------------


def test_the_demo_without_an_engine_says_how_to_make_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CORAL_ENGINE_PYTHON", raising=False)
    assert run(["serve-demo", "--once"]) == 2
    assert "make engine-cpu" in capsys.readouterr().err


def test_the_demo_wipes_no_folder_that_is_not_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CORAL_ENGINE_PYTHON", sys.executable)
    for name in ("PREFECT_HOME", "PREFECT_LOGGING_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    theirs = tmp_path / "run" / "results.csv"
    theirs.parent.mkdir()
    theirs.write_text("a year's work", encoding="utf-8")
    monkeypatch.setattr("tasks.local_serving.make_tiny_models", lambda *_: {})
    assert run(["serve-demo", "--folder", str(tmp_path), "--port", str(free_ports(1)[0])]) == 2
    assert "holds what no demo has written" in capsys.readouterr().err
    assert theirs.exists()


def test_the_demo_refuses_a_port_that_is_taken_and_a_folder_in_use(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORAL_ENGINE_PYTHON", sys.executable)
    for name in ("PREFECT_HOME", "PREFECT_LOGGING_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert run(["serve-demo", "--port", str(other.getsockname()[1])]) == 2
    assert "is taken" in capsys.readouterr().err
    import fcntl

    folder = tmp_path / "demo"
    folder.mkdir()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(["serve-demo", "--folder", str(folder), "--port", str(free_ports(1)[0])]) == 2
    assert "another demo runs here" in capsys.readouterr().err
