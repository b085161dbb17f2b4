"""`coral serve-demo`: the whole loop on this machine, from a plan to an answer, with real engines and tiny models."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators

from coral_core.cli.options import ScenarioName
from coral_core.cli.output import print_note, print_text
from coral_core.errors import CoralError, InputError, ServingError

if TYPE_CHECKING:
    from tasks.local_serving import Programs

_ASK = {"max_tokens": 16, "temperature": 0, "messages": [{"role": "user", "content": "hello"}]}


def serve_demo(
    *,
    scenario: ScenarioName = "local",
    folder: Annotated[Path, Parameter(help="Where all of it lies; wiped at the start but for the models.")] = Path(
        ".coral/serve-demo"
    ),
    port: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=65535), help="The gateway's port.")] = 8000,
    once: Annotated[bool, Parameter(negative="", help="End by itself after the first answers.")] = False,
) -> int:
    """Make tiny models, plan, start nodes and engines on this machine, and answer OpenAI's API until Ctrl-C.

    Nothing outlives it: also where it is killed, every process it has started ends.
    """
    from coral_core.cli.flows import flows_extra_missing
    from coral_core.cli.serve_extra import refuse_without
    from coral_core.cli.work import resolved_scenario
    from coral_core.config.settings import load_settings

    refuse_without("serving", "aiohttp", "msgspec", "prometheus_client", "uvicorn", "zmq")
    if importlib.util.find_spec("prefect") is None:
        raise flows_extra_missing(ModuleNotFoundError("prefect", name="prefect"))
    interpreter = load_settings().engine_interpreter()
    from tasks.local_serving import Programs, guarded, make_tiny_models, require_free, write_serving

    folder = folder.absolute()
    _quiet_prefect(folder / "prefect")
    resolved = resolved_scenario(scenario)
    require_free(port)
    _refuse_foreign(folder / "run")
    with _alone(folder), guarded(folder / "run"):
        print_text("1. Make the tiny models (random weights: what they answer is noise)")
        models = make_tiny_models(folder / "models", interpreter)
        shutil.rmtree(folder / "run", ignore_errors=True)
        serving = write_serving(
            resolved,
            scenario,
            folder / "run",
            models=models,
            interpreter=interpreter,
            store_url=(folder / "run" / "store").as_uri(),
            fleet="demo",
            port=port,
        )
        with Programs(serving=serving) as programs:
            print_text("2. Build the template library and look at the plan: coral plan")
            _show(programs, "plan", "plan", "--scenario", scenario)
            print_text(f"3. Start gateway and coordinator; what they say is in {serving.folder}/*.log")
            programs.start_gateway()
            programs.start_coordinator()
            try:
                print_text("4. Make it so: coral reallocate --mode apply (nodes start, engines load: a minute or two)")
                _reallocate(programs, scenario)
                print_text("5. Ask each model through the gateway")
                for name in models:
                    print_text(f"   {name}: {_answer(serving.gateway_url, name)!r}")
                _print_how_to_ask(serving.gateway_url, next(iter(models)))
                if not once:
                    _wait_for_the_end()
            finally:
                print_text("6. Drain and release everything: coral teardown")
                with contextlib.suppress(KeyboardInterrupt):
                    _teardown(programs)
    print_text("ended: no process is left")
    return 0


def _quiet_prefect(home: Path) -> None:
    """A demo leaves the user's Prefect alone, unless they said which to use."""
    home.mkdir(parents=True, exist_ok=True)
    for name, value in {
        "PREFECT_HOME": str(home),
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "DO_NOT_TRACK": "1",
    }.items():
        os.environ.setdefault(name, value)


def _refuse_foreign(folder: Path) -> None:
    """InputError for a folder that is about to be wiped and holds what no demo has written."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "coordinator.keys").exists():
        raise InputError("holds what no demo has written", where=str(folder), fix="give another --folder, or remove it")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One demo per folder at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError("another demo runs here", where=str(folder), fix="end it, or give --folder") from None
        yield


def _show(programs: Programs, name: str, *arguments: str) -> None:
    """Run a command to its end with its output for everybody to see. Raises ServingError where it fails."""
    done = subprocess.run(  # noqa: S603 - our own command
        programs.serving.command(*arguments), env=programs.serving.process_environment, check=False
    )
    if done.returncode:
        raise ServingError(f"`coral {name}` ended with {done.returncode}", where=str(programs.serving.folder))


def _reallocate(programs: Programs, scenario: str) -> None:
    """Carry the plan out, telling what starts meanwhile; the run itself gives up in time."""
    process = programs.start("reallocate", "reallocate", "--scenario", scenario, "--mode", "apply", "--json")
    told = ""
    while process.poll() is None:
        state = _instances(programs)
        if state != told:
            print_note(f"   {state}")
            told = state
        time.sleep(1.0)
    if process.returncode:
        said = programs.log("reallocate").read_text(encoding="utf-8").strip().splitlines()[-3:]
        raise ServingError(
            f"the plan was not carried out: {' '.join(said)}",
            where=str(programs.log("reallocate")),
            fix=f"try again when the machine is less busy; engines' logs: {programs.serving.folder}/local/nodes/*/agent",
        )


def _instances(programs: Programs) -> str:
    """Each instance that the gateway knows, ready or not."""
    from tasks.direct_http import open_directly

    serving = programs.serving
    token = Path(serving.environment["CORAL_GATEWAY_TOKEN_FILE"]).read_text(encoding="utf-8").strip()
    request = urllib.request.Request(  # noqa: S310 - our own address
        f"{serving.admin_url}/instances", headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with open_directly(request, timeout=5) as response:
            rows = json.load(response)["instances"]
    except (OSError, ValueError, KeyError):
        return "the gateway does not answer"
    return ", ".join(f"{row['name']} {_state(row)}" for row in rows) or "no instance yet"


def _state(row: Mapping[str, Any]) -> str:
    """Of an instance as the gateway's admin side lists it."""
    if row["failed"]:
        return "failed, to be replaced"
    return "ready" if row["ready"] else "starting" if row["reported"] is False else "not ready"


def _answer(url: str, model: str) -> str:
    from tasks.direct_http import open_directly

    body = json.dumps({"model": model, **_ASK}).encode()
    request = urllib.request.Request(  # noqa: S310 - our own address
        f"{url}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
    )
    try:
        with open_directly(request, timeout=120) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])
    except (OSError, ValueError, LookupError) as error:
        raise ServingError(f"{model} did not answer: {error}", where=url) from None


def _print_how_to_ask(url: str, model: str) -> None:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16})
    print_text("Try it from another shell of this machine (no key is asked for; any is taken):")
    print_text(f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    print_text(f"curl -s {url}/v1/models")


def _wait_for_the_end() -> None:
    print_text("Serving. Ctrl-C ends it.")
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


def _teardown(programs: Programs) -> None:
    """Orderly; whatever that leaves is killed afterwards."""
    running = programs.running.pop("reallocate", None)
    if running is not None and running.poll() is None:
        running.kill()
        running.wait()
        print_note("   the reallocation was cut off: its nodes are ended without draining")
        return
    try:
        _show(programs, "teardown", "teardown", "demo", "--yes")
    except CoralError as error:
        print_note(f"   {error}")
