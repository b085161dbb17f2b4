"""The `coral` command: a tree of lazily imported commands, one line per expected failure, exit codes that mean something."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from cyclopts import App, CycloptsError

from coral_core import __version__
from coral_core.errors import CoralError, InputError

USAGE_EXIT_CODE = InputError.exit_code

app = App(
    name="coral",
    version=__version__,
    suppress_keyboard_interrupt=False,  # `run` says that it was interrupted
    help="Serve many LLMs at once on rented, mixed cloud GPUs at the least cost.",
    help_epilogue="Exit codes: 0 done, 2 wrong input, 3 no (full) solution, 4 a fact is missing, 5 solver, 6 store, 7 cloud, 8 serving, 9 measurement.",
)
for group, text in {
    "catalog": "GPUs, node configurations and their prices.",
    "models": "Models that can be planned; add one from a Hugging Face config.json.",
    "workload": "Traces and their statistics.",
    "scenario": "What to serve, where, on what: list, show and copy scenarios.",
    "library": "Build, list, show, compare and tidy template libraries.",
    "plan": "The cheapest plan for a scenario, and why it is so.",
    "demand": "Measured demand of a fleet, and its forecast.",
    "fleet": "What runs, what a run would change, what earlier runs did.",
    "placement": "Solve placement problems of your own (JSON in, JSON out).",
    "allocation": "Solve allocation problems of your own (JSON in, JSON out).",
    "artifacts": "List, show, fetch and tidy what lies in the object store.",
    "profile": "Measured layer times, and the factors that estimates rest on.",
    "bench": "Measure what the work takes on this machine.",
    "evaluate": "Compare settings, policies and scenarios.",
    "gateway": "OpenAI's API in front of the fleet's instances, and its keys.",
    "coordinator": "Brings serving instances up on their nodes and watches over them.",
    "agent": "A node's agent: registers with the coordinator and runs the node's engine.",
    "keys": "Keys with which coordinator and agents know each other.",
    "flows": "Prefect: run the flows, serve the deployments.",
}.items():
    app.command(f"coral_core.cli.{group}:app", name=group, help=text)
SINGLE = {
    "doctor": "What is installed, licensed and reachable; input ages.",
    "reallocate": "Plan, and make the fleet the plan.",
    "teardown": "Release all that a fleet holds.",
    "demo": "The main job on the scenario `tiny`, end to end.",
    "serve-demo": "The whole loop on this machine, with real engines.",
    "simulate": "One policy on a scenario, in the simulator.",
    "predict": "TTFT and TPOT of one replica under load, with error bars.",
    "ledger": "Predicted against measured, the worst first.",
    "calibrate": "How much of a capacity plans may count on, simulated.",
}
"""Commands of one function, and their line in the list; the page of each has the function's own text."""
for command, text in SINGLE.items():
    function = command.replace("-", "_")
    app.command(f"coral_core.cli.{function}:{function}", name=command, help=text)
app.register_install_completion_command(name="--install-completion")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; expected failures print one line, bugs keep their traceback."""
    signal.signal(signal.SIGTERM, _ended)
    sys.exit(run(arguments))


def _ended(number: int, _frame: FrameType | None) -> None:
    """End as an exception does, so that temporary folders go; the workers first, since leaving their pool waits for them."""
    if "multiprocessing" in sys.modules:
        import multiprocessing

        for child in multiprocessing.active_children():
            child.terminate()
    raise SystemExit(128 + number)


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        refuse_foreign_packages()
        _give_own_page(sys.argv[1:] if arguments is None else arguments)
        result = app(arguments, print_error=False, exit_on_error=False, result_action="return_value")
    except CycloptsError as error:
        return _fail(str(error), USAGE_EXIT_CODE)
    except CoralError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # The reader (head, less) has gone; keep the interpreter from failing once more while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


def _give_own_page(arguments: list[str]) -> None:
    """Let `coral COMMAND --help` show all that the command's docstring says: its line in the list would hide that."""
    if set(app.help_flags).isdisjoint(arguments):
        return
    found = app
    for name in arguments:
        if name.startswith("-") or name not in found:
            break
        found = found[name]
    if found.default_command is not None:
        found.help = None


def _fail(message: str, code: int) -> int:
    print(f"coral: {' '.join(message.split())}", file=sys.stderr)
    return code


def refuse_foreign_packages() -> None:
    """`flows`, `tasks` and `artifacts` are common names: InputError if Python would import somebody else's."""
    home = Path(__file__).resolve().parents[2]
    for name in ("flows", "tasks", "artifacts"):
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin != home / name / "__init__.py":
            found = "is not installed" if origin is None else f"comes from {origin.parent}"
            raise InputError(
                f"the package `{name}` {found}, not from this installation of Coral ({home})",
                where="sys.path",
                fix="run from another folder, or use an environment of Coral's own",
            )
