"""Which allocator a process gets, and that a program begins again with it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from verl import malloc
from verl.malloc import GLIBC, JEMALLOC, malloc_env

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = str(malloc._jemalloc())
AGAIN = """
import os, verl.malloc
verl.malloc.rerun_with_malloc("again")
maps = open("/proc/self/maps").read()
print(os.getpid(), "libjemalloc" in maps)
"""


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what the tests' own process was started with."""
    for name in {"LD_PRELOAD"} | JEMALLOC.keys() | GLIBC.keys():
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"LD_PRELOAD": LIBRARY, **JEMALLOC}),
        ({"LD_PRELOAD": "/x/libfoo.so"}, {"LD_PRELOAD": f"{LIBRARY}:/x/libfoo.so", **JEMALLOC}),
        ({"LD_PRELOAD": LIBRARY}, {"LD_PRELOAD": LIBRARY, **JEMALLOC}),
        ({"LD_PRELOAD": "/x/libtcmalloc.so"}, GLIBC),
        ({"MALLOC_CONF": "stats_print:true"},
         {"LD_PRELOAD": LIBRARY, "MALLOC_CONF": "stats_print:true"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_user_s_allocator_and_settings_take_precedence(
    own: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's jemalloc is preloaded before what the user preloads, unless that is an allocator."""
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert malloc_env() == expected


def test_without_jemalloc_glibc_keeps_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's tunables stay."""
    monkeypatch.setattr(malloc, "_jemalloc", lambda: None)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert malloc_env() == GLIBC | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}


@pytest.mark.parametrize("has_gpu", [False, True])
def test_nothing_is_restarted_beside_a_gpu(
    has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator is for tensors in host memory."""
    restarted = list[str]()
    monkeypatch.setattr(malloc, "NVIDIA", tmp_path if has_gpu else tmp_path / "none")
    monkeypatch.setattr(os, "execve", lambda path, words, env: restarted.append(path))
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec("program", None))
    malloc.rerun_with_malloc("program")
    assert restarted == ([] if has_gpu else [sys.executable])


@pytest.mark.parametrize("is_called", [False, True])
def test_a_program_begins_again_once(is_called: bool, tmp_path: Path) -> None:
    """The same process, now with the library; not one that only calls the program."""
    (tmp_path / "again.py").write_text(AGAIN)
    call = ["-c", "import runpy; runpy.run_module('again', run_name='__main__')"]
    child = subprocess.Popen([sys.executable, *(call if is_called else ["-m", "again"])],
                             stdout=subprocess.PIPE, text=True, cwd=tmp_path,
                             env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    output, _ = child.communicate(timeout=60)
    assert output.split() == [str(child.pid), str(not is_called and os.path.isfile(LIBRARY))]
