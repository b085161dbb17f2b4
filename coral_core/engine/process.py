"""One node's engine as a process: started, watched from its first line to its last, and ended with all it started."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from coral_core.clock import ListeningClock
from coral_core.domain.launch import NodeLaunch
from coral_core.engine.engine_log import EngineLog
from coral_core.engine.kept import Kept
from coral_core.engine.liveness import Liveness, LivenessTerms
from coral_core.engine.probe import Probe
from coral_core.engine.scrape import EngineSample
from coral_core.engine.state import Cause, Condition, EngineFailure, EngineState, StartStep
from coral_core.errors import ServingError

CODE_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds `coral_core`: where the engine's interpreter finds the plugin."""
STEP_LIMIT_VARIABLE = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
START_LIMIT_VARIABLE = "VLLM_ENGINE_READY_TIMEOUT_S"
START_LOOK_S = 0.2
FIRST_TOKEN_S = 60.0
"""What the first completion gets; another is tried until the start's time is over."""
LONGEST_LOOK_S = FIRST_TOKEN_S + 10.0
"""More than one look at a start takes; of a longer gap only so much counts as its time."""
LAST_WORDS_S = 10.0
MOST_BUGS = 5
"""So many looks in a row that a bug ends are the engine's end: nobody would know how it is."""
LONGEST_BEGUN_BYTES = 1 << 16
"""A progress bar writes for hours without ending its line."""
_log = logging.getLogger(__name__)
_OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Of our environment, not of the engine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTerms:
    """How long a start may take, how often a ready engine is looked at, and when it counts as hung."""

    start_s: float = 900.0
    look_s: float = 1.0
    liveness: LivenessTerms = field(default_factory=LivenessTerms)


def start_engine(
    launch: NodeLaunch,
    *,
    interpreter: Path,
    log: Path,
    owner: str,
    url: str | None = None,
    terms: WatchTerms | None = None,
) -> EngineProcess:
    """Start the engine of one node and return at once; what follows is in the `state` of the result.

    `log` is appended to. `url` is the address of a node that serves. `owner` names who starts it, across restarts: what a
    killed owner leaves behind is ended by `kept.end_left_behind(owner)`. Without `terms` those of `watch_terms` hold.
    InputError for an owner with a '#', ServingError where the log cannot be written or no process can be had.
    """
    terms = watch_terms(launch.env) if terms is None else terms
    try:
        return EngineProcess(launch, interpreter=interpreter, log=log, owner=owner, url=url, terms=terms)
    except OSError as error:
        raise ServingError(
            f"cannot start an engine that logs to {log}: {error.strerror or error}", where=launch.node
        ) from None


def watch_terms(env: Mapping[str, str]) -> WatchTerms:
    """The usual terms, but a start may take as long as the launch says, and where a step may, a hang is one only after that."""
    usual = WatchTerms()
    # A little before vLLM itself gives up, whose end takes a while too.
    hung_after_s = max(usual.liveness.hung_after_s, _seconds(env, STEP_LIMIT_VARIABLE, 0.0) - 1.0)
    return WatchTerms(
        start_s=_seconds(env, START_LIMIT_VARIABLE, usual.start_s),
        liveness=replace(usual.liveness, hung_after_s=hung_after_s),
    )


def _seconds(env: Mapping[str, str], name: str, usual_s: float) -> float:
    try:
        return float(env[name])
    except (KeyError, ValueError):
        return usual_s


class EngineProcess:
    """A started engine. `state` and `sample` may be read from any thread at any time and never wait.

    A node that serves is ready once it has completed a prompt; another once its weights are loaded, which is all it can show.
    """

    def __init__(
        self, launch: NodeLaunch, *, interpreter: Path, log: Path, owner: str, url: str | None, terms: WatchTerms
    ) -> None:
        self.launch = launch
        self._terms = terms
        self._probe = Probe(url) if launch.serves and url is not None else None
        self._log = EngineLog()
        self._liveness = Liveness(terms=terms.liveness)
        self._model: str | None = None
        self._stopping = False
        self._sample: EngineSample | None = None
        self._state = EngineState(condition=Condition.STARTING, reached=tuple(self._log.reached))
        self._began_s = time.monotonic()
        self._watched_s = ListeningClock(time.monotonic, most_s=LONGEST_LOOK_S)
        self._kept: Kept | None = None
        taken = _taken_port(launch.ports)
        if taken is not None:
            self._fail(
                EngineFailure(
                    cause=Cause.PORT_TAKEN,
                    what=f"port {taken} is taken",
                    fix="end what listens there, or give the node other ports",
                )
            )
            return
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        read_from = log.stat().st_size
        inherited = {name: text for name, text in os.environ.items() if name not in _OWN_VARIABLES}
        self._kept = Kept(
            argv=[str(interpreter), *launch.argv],
            env={**inherited, "PYTHONPATH": str(CODE_ROOT), "PYTHONUNBUFFERED": "1", **launch.env},
            log=log,
            owner=owner,
        )
        self._watcher = threading.Thread(
            target=self._watch, args=(self._kept, _LogFile(log, read_from)), name=f"watch {launch.node}", daemon=True
        )
        self._watcher.start()

    @property
    def state(self) -> EngineState:
        """The newest state."""
        return self._state

    @property
    def sample(self) -> EngineSample | None:
        """The newest metrics of a ready node that serves; None where it did not answer."""
        return self._sample

    @property
    def pid(self) -> int | None:
        """The engine's root process; None before it is started."""
        return self._kept.pid if self._kept else None

    def wait(self, timeout_s: float) -> EngineState:
        """The state once the start has succeeded or failed, at the latest after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while self._state.condition is Condition.STARTING and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return self._state

    def stop(self, grace_s: float) -> EngineState:
        """End it: SIGTERM to its root, after `grace_s` SIGKILL to all it started. Returns when nothing is left; repeatable.

        A failed engine stays `failed`, any other is `ended`.
        """
        self._stopping = True
        if self._kept is not None:
            self._kept.stop(max(grace_s, 0.0))
            self._watcher.join(max(grace_s, 0.0) + LAST_WORDS_S)
            if self._watcher.is_alive():
                self._kept.kill()
                self._watcher.join(LAST_WORDS_S)
        return self._state

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _set(self, condition: Condition, failure: EngineFailure | None = None, exit_code: int | None = None) -> None:
        self._state = EngineState(
            condition=condition, reached=tuple(self._log.reached), failure=failure, exit_code=exit_code
        )

    def _fail(self, failure: EngineFailure, exit_code: int | None = None) -> None:
        self._set(Condition.FAILED, failure, exit_code)

    def _watch(self, kept: Kept, log_file: _LogFile) -> None:
        """Until the engine is gone; a failed one is only waited for."""
        bugs = 0
        while not kept.gone:
            try:
                self._look(kept, log_file)
                bugs = 0
            except Exception as error:  # noqa: BLE001 - logged whole; a state that nobody looks after would be believed for ever
                bugs += 1
                if bugs <= MOST_BUGS:
                    _log.exception("a look at the engine of node %s ended by a bug", self.launch.node)
                if bugs == MOST_BUGS and not self._state.final:
                    self._fail_by(error)
                time.sleep(START_LOOK_S)
        try:
            self._log.read(log_file.rest(), self._elapsed_s())
            log_file.close()
            self._settle(kept)
        except Exception as error:  # noqa: BLE001 - as above
            _log.exception("the last look at the engine of node %s ended by a bug", self.launch.node)
            self._fail_by(error, kept.exit_code)

    def _fail_by(self, bug: Exception, exit_code: int | None = None) -> None:
        what = f"nobody can say how it is, because of a bug: {bug!r}"
        self._fail(EngineFailure(cause=Cause.BUG, what=what, log_lines=self._log.tail()), exit_code)

    def _look(self, kept: Kept, log_file: _LogFile) -> None:
        """See how it is, and wait until it is time to look again."""
        began_s = time.monotonic()
        kept.poll()
        self._log.read(log_file.new_lines(), self._elapsed_s())
        if kept.gone:
            return
        if not self._stopping and self._state.condition is Condition.STARTING:
            self._look_at_start()
        elif not self._stopping and self._state.condition is Condition.READY and self._probe is not None:
            self._look_at_work(self._probe)
        every_s = self._terms.look_s if self._state.condition is Condition.READY else START_LOOK_S
        until_s = began_s + every_s
        while not kept.gone and not self._stopping and time.monotonic() < until_s:
            time.sleep(0.05)
            kept.poll()
        if self._stopping:
            time.sleep(0.05)

    def _look_at_start(self) -> None:
        watched_s = self._watched_s()
        self._set(Condition.STARTING)
        if self._probe is None:
            ready = any(step is StartStep.WEIGHTS for step, _ in self._log.reached)
        else:
            ready = self._answers(self._probe)
        if ready:
            self._set(Condition.READY)
        elif watched_s > self._terms.start_s:
            what = f"not ready after {self._terms.start_s:g} s; it had got as far as {self._state.step.value!r}"
            fix = "where the model only takes longer to load, give it a longer start_limit_s in engine.yaml"
            self._fail(EngineFailure(cause=Cause.START_TIMEOUT, what=what, fix=fix, log_lines=self._log.tail()))

    def _answers(self, probe: Probe) -> bool:
        """Whether it has completed a prompt, after its port has answered; each is noted with its time."""
        if self._model is None:
            if not probe.listens():
                return False
            self._model = probe.served_model()
            if self._model is None:
                return False
            self._log.reach(StartStep.HTTP, self._elapsed_s())
            self._set(Condition.STARTING)
        left_s = self._terms.start_s - self._watched_s()
        if not probe.one_token(self._model, min(FIRST_TOKEN_S, max(left_s, 1.0))):
            return False
        self._log.reach(StartStep.ANSWERED, self._elapsed_s())
        return True

    def _look_at_work(self, probe: Probe) -> None:
        self._sample = probe.sample()
        self._liveness.look(self._sample, time.monotonic())
        hang = self._liveness.hang()
        if hang:
            self._fail(EngineFailure(cause=Cause.HUNG, what=hang, log_lines=self._log.tail()))
        elif self._liveness.probe_is_due():
            self._liveness.probing = True
            threading.Thread(target=self._send_probe, args=(probe,), name="probe", daemon=True).start()

    def _send_probe(self, probe: Probe) -> None:
        terms = self._terms.liveness
        answered = probe.one_token(self._model or "", terms.hung_after_s + terms.gone_after_s)
        self._liveness.probe_returned(answered=answered)

    def _settle(self, kept: Kept) -> None:
        """The last state, when nothing of the engine is left."""
        if self._state.condition is Condition.FAILED:
            self._fail(self._state.failure or EngineFailure(cause=Cause.LEFT, what="failed"), kept.exit_code)
        elif self._stopping:
            self._set(Condition.ENDED, exit_code=kept.exit_code)
        elif kept.refused:
            fix = "set CORAL_ENGINE_PYTHON to an interpreter that has vLLM"
            self._fail(EngineFailure(cause=Cause.NOT_LAUNCHED, what=kept.refused, fix=fix))
        elif kept.orphaned:
            what = "killed together with the process that keeps it"
            self._fail(EngineFailure(cause=Cause.KILLED, what=what, log_lines=self._log.tail()))
        else:
            was_ready = self._state.condition is Condition.READY
            failure = self._log.failure(kept.exit_code, self._elapsed_s(), was_ready=was_ready)
            self._fail(failure, kept.exit_code)


class _LogFile:
    """Lines of a file that grows, from byte `begin` on."""

    def __init__(self, path: Path, begin: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._file.seek(begin)
        self._begun = b""

    def new_lines(self) -> list[str]:
        """The lines that have been finished since the last call; a progress bar's last state counts as its line."""
        *lines, begun = (self._begun + self._file.read()).split(b"\n")
        self._begun = begun[-LONGEST_BEGUN_BYTES:]
        return [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines]

    def rest(self) -> list[str]:
        """All that is left, finished or not."""
        return [*self.new_lines(), self._begun.decode(errors="replace")]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _taken_port(ports: tuple[int, ...]) -> int | None:
    """The first port that somebody listens on; the engine itself would find out only after its imports."""
    for port in ports:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("", port))
            except OSError:
                return port
    return None
