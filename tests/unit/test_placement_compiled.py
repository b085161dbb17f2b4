"""The cache of compiled kernels, with a tiny kernel in a folder of its own."""

import os
import subprocess
import sys

import pytest

TINY = """
from coral_core.placement.compiled import compiled

@compiled("i8(i8)")
def double(x):
    return 2 * x
"""
RUN = "import tiny; assert tiny.double(21) == 42"


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "tiny.py").write_text(TINY)
    (tmp_path / "home").mkdir()
    return tmp_path


def start(tiny, *, repository, home=None, code=RUN, **extra):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA", "XDG", "PYTHON", "COV"))}
    env |= {"PYTHONPATH": f"{tiny / 'src'}{os.pathsep}{repository}", "HOME": str(home or tiny / "home"), **extra}
    command = [sys.executable, "-B", "-c", code]
    return subprocess.Popen(command, env=env, cwd=tiny, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process):
    out, err = process.communicate(timeout=550)
    assert process.returncode == 0, err
    assert err == ""
    return out


def caches(folder):
    return sorted(path.name for path in folder.rglob("*.nb[ic]"))


def test_a_second_process_loads_what_the_first_compiled(tiny, repository):
    ended(start(tiny, repository=repository))
    assert len(caches(tiny / "src")) == 2
    stamp = {path: path.stat().st_mtime_ns for path in (tiny / "src").rglob("*.nb[ic]")}
    ended(start(tiny, repository=repository))
    assert stamp == {path: path.stat().st_mtime_ns for path in (tiny / "src").rglob("*.nb[ic]")}


def test_processes_that_compile_at_once_all_succeed(tiny, repository):
    for process in [start(tiny, repository=repository) for _ in range(3)]:
        ended(process)
    assert len(caches(tiny / "src")) == 2


def block(folder):
    """A file where the cache folder would be: unwritable even for root."""
    (folder / "__pycache__").write_text("")


def test_a_package_folder_that_cannot_be_written_falls_back_to_the_users_cache(tiny, repository):
    block(tiny / "src")
    ended(start(tiny, repository=repository))
    assert caches(tiny / "src") == []
    assert len(caches(tiny / "home")) == 2


def test_without_any_writable_folder_the_process_compiles_for_itself(tiny, repository):
    block(tiny / "src")
    (tiny / "nohome").write_text("")
    ended(start(tiny, repository=repository, home=tiny / "nohome"))
    assert caches(tiny) == []


def test_without_a_cache_the_function_is_compiled_all_the_same(monkeypatch):
    from coral_core.placement import compiled as module

    def uncached(signature, *, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return lambda function: (signature, options, function)

    monkeypatch.setattr(module.numba, "njit", uncached)
    signature, options, function = module.compiled("i8(i8)")(abs)
    assert (signature, options["nogil"], function) == ("i8(i8)", True, abs)


def test_other_compilation_errors_are_not_hidden(monkeypatch):
    from coral_core.placement import compiled as module

    def broken(*args, **kwargs):
        raise RuntimeError("the machine is on fire")

    monkeypatch.setattr(module.numba, "njit", broken)
    with pytest.raises(RuntimeError, match="on fire"):
        module.compiled("i8(i8)")(lambda x: x)


def test_importing_the_methods_does_not_import_numba_or_a_solver(repository, tiny):
    """`coral --help` must answer at once."""
    code = (
        "import sys; import coral_core.placement.methods, coral_core.placement.combinations;"
        "heavy = {'numba', 'highspy', 'gurobipy'} & set(sys.modules); assert not heavy, heavy"
    )
    ended(start(tiny, repository=repository, code=code))


@pytest.mark.nightly
def test_the_whole_kernel_compiles_in_many_processes_at_once(repository, tmp_path):
    (tmp_path / "src").mkdir()
    code = (
        "import numpy as np; from coral_core.domain.placement import PlacementProblem as P;"
        "from coral_core.placement.lattice import LatticePlacement as M; r = np.array([3., 1.]);"
        "p = P(layers=2, nodes=('a', 'a'), capacity_tokens_per_s={1: {'a': r}, 2: {'a': r}});"
        "assert M().solve(p).throughput_tokens_per_s == 3.0"
    )
    cache = str(tmp_path / "cache")
    extra = {"repository": repository, "home": tmp_path, "code": code, "NUMBA_CACHE_DIR": cache}
    for process in [start(tmp_path, **extra) for _ in range(4)]:
        ended(process)
    kept = {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in (tmp_path / "cache").rglob("*.nb[ic]")}
    assert kept
    assert all(size for size, _ in kept.values())
    ended(start(tmp_path, **extra))  # compiles nothing more
    assert kept == {
        path: (path.stat().st_size, path.stat().st_mtime_ns) for path in (tmp_path / "cache").rglob("*.nb[ic]")
    }
