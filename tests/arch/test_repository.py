"""What may be committed: names, sizes, addresses; and that the texts name only what exists."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 450
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".csv", ".lock", ".in", ".cfg", ".sh", ".txt", ""}


def committed_files() -> list[Path]:
    """What is in git, and what would be with the next `git add`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in sorted(set(listing.split("\0"))) if name and (ROOT / name).is_file()]


def texts() -> list[tuple[str, str]]:
    files = [path for path in committed_files() if path.suffix in TEXT_SUFFIXES]
    return [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in files]


def test_the_top_level_is_the_fixed_layout():
    allowed = {
        *("flows", "tasks", "coral_core", "artifacts", "infra", "tests", "docs", "requirements", ".ci"),
        *("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile"),
        *(".gitignore", ".importlinter"),
    }
    assert {path.relative_to(ROOT).parts[0] for path in committed_files()} <= allowed


def test_no_module_has_a_name_that_says_nothing():
    empty = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
    strays = [path for path in committed_files() if path.suffix == ".py" and empty & {path.stem, *path.parts}]
    assert not strays


def test_no_source_file_is_too_long():
    lengths = {name: text.count("\n") for name, text in texts() if name.endswith(".py")}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


def test_no_file_names_a_registry_or_a_place_on_somebodys_machine():
    # Built from parts, so that this file does not name them either.
    hosts = ["py" + "pi.org", "python" + "hosted.org", "npm" + "js.org", "ana" + "conda.org", "artifact" + "ory"]
    places = "|".join(["wo" + "rk", "ro" + "ot", "ho" + r"me/\w+", "Us" + r"ers/\w+"])
    pattern = re.compile(rf"{'|'.join(map(re.escape, hosts))}|(?<![\w.~*$}})-])/(?:{places})/")
    strays = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts()
        if name != "LICENSE"
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not strays, "\n".join(strays)


@pytest.mark.parametrize("name", ["dev.lock", "base.lock", "infra.lock", "engine-cpu.lock"])
def test_a_lock_file_pins_and_hashes_everything_and_names_no_index(name):
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    assert not re.search(r"^\s*(--(extra-)?index-url|--find-links|-i|-f)\b|://", text, re.MULTILINE)
    entries = re.split(r"^(?=[a-zA-Z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(entries) > 15
    unpinned = [
        entry.split()[0] for entry in entries if not re.match(r"[\w.-]+==\S+", entry) or "--hash=sha256:" not in entry
    ]
    assert not unpinned


def test_the_locks_cover_what_the_project_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    locked = {name: _pinned(name) for name in ("dev.lock", "base.lock")}
    base = {_package(line) for line in project["dependencies"]}
    others = {_package(line) for extra in ("flows", "aws", "gurobi", "report", "dev") for line in extras[extra]}
    assert base <= locked["base.lock"].keys()
    assert base | others <= locked["dev.lock"].keys()
    assert locked["base.lock"].items() <= locked["dev.lock"].items(), "base.lock and dev.lock differ: run `make lock`"


def _pinned(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    return {_package(package): version for package, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


def _package(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^\.PHONY: (\S+)$", makefile, re.MULTILINE))


def test_make_help_lists_every_command():
    help_text = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert make_targets() == set(re.findall(r"^  make (\S+) +\S", help_text, re.MULTILINE))


def documents() -> list[tuple[str, str]]:
    return [(name, text) for name, text in texts() if name.endswith(".md") and "tests/" not in name]


def test_documents_name_only_make_targets_that_exist():
    named = {
        (name, target)
        for name, text in documents()
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
    }
    assert named
    assert not {(name, target) for name, target in named if target not in make_targets()}


def test_links_between_documents_lead_somewhere():
    broken = [
        f"{name}: {target}"
        for name, text in documents()
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
        if not (ROOT / name).parent.joinpath(target).exists()
    ]
    assert not broken


def test_coral_commands_in_documents_and_fixes_exist():
    """`coral a b` at the start of a code line or span, in texts and in the `fix` of errors, must be a command."""
    from coral_core.cli.entry import app

    spans = [
        (name, span)
        for name, text in documents()
        for span in re.findall(r"(?:^\$? ?|`)(coral [a-z][^`\n#]*)", text, re.MULTILINE)
    ]
    spans += [(name, span) for name, fix in fixes() for span in re.findall(r"(?:^|`|run )(coral [a-z][^`]*)", fix)]
    faults = [f"{name}: `{span}`: {fault}" for name, span in spans if (fault := command_fault(app, span.split()[1:]))]
    assert not faults, "\n".join(faults)


def command_fault(app, words: list[str]) -> str:
    """What is wrong with the command or option names of a command line; empty where nothing is."""
    chain, apps, rest = app.parse_commands(words)
    if not chain:
        return "no such command"
    subcommands = [name for name in apps[-1] if not name.startswith("-")]
    if subcommands and rest and rest[0].isalpha() and rest[0].islower():
        return f"no such command, there are {subcommands}"
    options = {name for argument in apps[-1].assemble_argument_collection() for name in argument.names}
    unknown = {word.partition("=")[0] for word in rest if word.startswith("--")} - options - {"--help"}
    return f"no option {sorted(unknown)}" if unknown else ""


def fixes() -> list[tuple[str, str]]:
    """Every literal part of a `fix=` argument in our packages, with its place."""
    found = []
    for name, text in texts():
        if not name.endswith(".py") or name.startswith(("tests/", ".ci/")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.keyword) and node.arg == "fix":
                literals = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
                found += [(f"{name}:{node.value.lineno}", part) for part in literals if isinstance(part, str)]
    return found


def test_options_named_in_fixes_exist():
    """An error that advises `--option` must name a parameter of some command."""
    parameters = {"json"}  # `as_json`, named apart in options.py
    for name, text in texts():
        if name.startswith("coral_core/cli/"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.arg):
                    parameters.add(node.arg.replace("_", "-"))
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    parameters.add(node.target.id.replace("_", "-"))
    named = {(place, option) for place, fix in fixes() for option in re.findall(r"(?<![\w-])--([a-z][a-z-]+)", fix)}
    assert not {(place, option) for place, option in named if option.removeprefix("no-") not in parameters}
