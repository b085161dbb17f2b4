"""Flow runs in processes of their own that die, or hold their breath, at the n-th call that changes the cloud.

`python -m tests.fakes.mortal_flow` imports everything once, then forks a child for each line of JSON it reads:
{"params": {...}, "cwd": folder, "die_at": n, "hang_at": n}. It answers with one line: {"code": exit code, "name", "message"}.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tests.fakes.waiting import PATIENT_S, until

CHANGES = ("start", "stop", "release_group")
AWAKE = "awake"
"""Where this file appears in its folder, a run that hangs goes on."""


class Mortal:
    """A provisioner whose process ends at the n-th moment around a change: odd ones before a call, even ones after."""

    def __init__(self, provisioner, *, die_at: int = 0, hang_at: int = 0) -> None:
        self._provisioner, self._die_at, self._hang_at = provisioner, die_at, hang_at
        self._moments = 0

    def __getattr__(self, name):
        found = getattr(self._provisioner, name)
        if name not in CHANGES:
            return found

        def call(*arguments):
            self._moment()
            answer = found(*arguments)
            self._moment()
            return answer

        return call

    def _moment(self) -> None:
        self._moments += 1
        if self._moments == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._moments == self._hang_at:
            until(Path(AWAKE).exists, "the run is woken", within_s=240.0)


@dataclass
class Nursery:
    """The process that forks runs; start with `with`."""

    environment: dict[str, str]
    folder: Path
    process: Any = None
    log: Any = field(default=None, repr=False)

    def __enter__(self) -> Self:
        self.log = (self.folder / "nursery.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.mortal_flow"],
            env=os.environ | self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=PATIENT_S)
        self.process.stdout.close()
        self.log.close()

    def begin(self, params: dict[str, Any], *, cwd: Path, **how: Any) -> None:
        """Ask for a run; its answer comes with `ended`."""
        self.process.stdin.write(json.dumps({"params": params, "cwd": str(cwd), **how}) + "\n")
        self.process.stdin.flush()

    def ended(self) -> dict[str, Any]:
        """The answer of the next run that ends."""
        return json.loads(self.process.stdout.readline())

    def run(self, params: dict[str, Any], *, cwd: Path, **how: Any) -> dict[str, Any]:
        self.begin(params, cwd=cwd, **how)
        return self.ended()


def _child(wish: dict[str, Any], answers: int) -> None:
    import tasks.apply
    from flows.parameters import ReallocateParameters
    from flows.reallocate import reallocate

    os.chdir(wish["cwd"])
    opened = tasks.apply.open_provider
    faults = {name: wish[name] for name in ("die_at", "hang_at") if name in wish}

    def mortal(settings, name=None):
        provider = opened(settings, name)
        return replace(provider, provisioner=Mortal(provider.provisioner, **faults))

    tasks.apply.open_provider = mortal
    state = reallocate(ReallocateParameters(**wish["params"]), return_state=True)
    answer = {"tag": wish.get("tag"), "code": 0, "name": state.name, "message": state.message}
    os.write(answers, (json.dumps(answer) + "\n").encode())


def main() -> None:
    """Fork a child per line; a child that dies is answered for."""
    import flows.reallocate

    answers, sys.stdout = os.dup(1), sys.stderr
    os.dup2(2, 1)
    children: dict[int, Any] = {}
    for line in sys.stdin:
        wish = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                _child(wish, answers)
            except BaseException as error:  # noqa: BLE001  # whatever it was, the parent is told
                os.write(
                    answers, (json.dumps({"tag": wish.get("tag"), "code": 1, "message": repr(error)}) + "\n").encode()
                )
            os._exit(0)
        children[pid] = wish.get("tag")
        if wish.get("die_at"):
            _, status = os.waitpid(pid, 0)
            if os.WIFSIGNALED(status):
                code = -os.WTERMSIG(status)
                os.write(answers, (json.dumps({"tag": children[pid], "code": code}) + "\n").encode())
    assert flows.reallocate
    for pid in children:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            continue


if __name__ == "__main__":
    main()
