"""`make mutants`: mutation tests of the core modules.

cosmic-ray makes the changes, one at a time, in a copy of the checkout. A mutant that passes the
tests of its module is printed with its line. The mutants of each module are sampled by a seed. The
checkout itself is not changed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import gc
import importlib
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType

import pytest

ROOT = Path(__file__).resolve().parents[3]
COPIED = ("verl", "search_r1", "tests", "example", "benchmarks", "scripts", "pyproject.toml")
ALGORITHMS, CHECKPOINTS = "tests/core/core_algos", "tests/verl/checkpoint"
CUT = (
    "tests/verl/agent/test_dialogue_cut.py::test_results_are_cut_as_if_they_were_encoded_as_a_whole"
)
TOOL = "tests/agent/test_retriever.py"
REFUSED = f"{TOOL}::test_a_run_that_its_retriever_refuses_ends_before_it_begins"
"""A slow test that is not needed to detect mutants."""
CORE_MODULES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "verl/core_algos/advantages.py": [f"{ALGORITHMS}/test_advantages.py"],
        "verl/core_algos/groups.py": [f"{ALGORITHMS}/test_groups.py"],
        "verl/core_algos/jagged.py": [f"{ALGORITHMS}/test_jagged.py"],
        "verl/core_algos/kl.py": [f"{ALGORITHMS}/test_kl.py"],
        "verl/core_algos/losses.py": [f"{ALGORITHMS}/test_losses.py"],
        "verl/core_algos/mismatch.py": [f"{ALGORITHMS}/test_mismatch.py"],
        "verl/core_algos/policy_losses.py": [f"{ALGORITHMS}/test_policy_losses.py"],
        "verl/core_algos/shaping.py": [f"{ALGORITHMS}/test_shaping.py"],
        "verl/types.py": ["tests/core/test_types.py", "tests/core/test_packing.py"],
        "verl/data/prompts.py": ["tests/core/data/test_data.py"],
        "verl/trainer/learn.py": ["tests/verl/trainer/test_learn.py"],
        "verl/training/actor.py": ["tests/verl/training/test_actor.py"],
        "verl/training/attention.py": ["tests/verl/training/test_attention.py"],
        "verl/agent/dialogue.py": [
            "tests/core/agent/test_dialogue.py",
            "tests/agent/test_generation.py",
            "tests/verl/agent/test_dialogue_cut.py",
            f"--deselect={CUT}[bytes]",
        ],
        "verl/agent/grammar.py": [
            "tests/agent/test_tags.py",
            "tests/core/rewards/test_answers.py",
            "tests/core/rewards/test_format.py",
        ],
        "verl/agent/tags.py": ["tests/agent/test_tags.py", "tests/agent/test_generation.py"],
        "verl/ext/retry.py": ["tests/verl/ext/test_retry.py"],
        "search_r1/agent/retriever.py": [TOOL, f"--deselect={REFUSED}"],
        "search_r1/retrieval/client.py": [
            "tests/retrieval/test_client.py",
            "tests/retrieval/test_client_connections.py",
        ],
        "verl/checkpoint/folders.py": [
            f"{CHECKPOINTS}/test_folders.py",
            f"{CHECKPOINTS}/test_saver.py",
            f"{CHECKPOINTS}/test_contents.py::test_a_sound_checkpoint_is_read",
            f"{CHECKPOINTS}/test_contents.py::test_no_damaged_file_is_resumed_from",
        ],
        "verl/checkpoint/saver.py": [f"{CHECKPOINTS}/test_saver.py"],
    }
)
"""Modules, and the tests that must detect a change in them, as arguments of pytest."""
WARM = (
    "transformers.models.qwen2.modeling_qwen2", "torch.distributed.fsdp",
    "torch.distributed.tensor", "hypothesis", "pandas", "pyarrow", "pydantic", "ray", "httpx",
    "hydra", "yaml", "fastapi", "uvicorn", "tyro", "peft", "bm25s",
)  # fmt: skip
"""Modules to import once, before a process is forked for each mutant, like pytest's plugins."""
TIMEOUT_S, TIMEOUT_FACTOR = 20.0, 5.0
"""A mutant is detected if its tests exceed TIMEOUT_S + TIMEOUT_FACTOR times their usual time."""


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    module: str
    line: int
    operator: str
    code: str
    """Source of the changed module."""

    def diff(self, original: str) -> str:
        """Return the lines that differ."""
        before, after = original.splitlines(), self.code.splitlines()
        lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))
        return "\n".join(line for line in lines[2:] if line[0] != "@")  # without file names


def mutants_of(module: str, source: str) -> Iterator[Mutant]:
    """Yield all mutants of a module, except of annotations, whose changes no test can detect."""
    from cosmic_ray.ast import ast_nodes, get_ast  # noqa: PLC0415 - `make mutants` installs it
    from cosmic_ray.mutating import mutate_code  # noqa: PLC0415
    from cosmic_ray.plugins import get_operator, operator_names  # noqa: PLC0415

    ignored, nodes = lines_without_effect(source), list(ast_nodes(get_ast(source)))
    seen = {source}
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments() or "BitOr" in name or name.endswith("BitAnd_Mul"):
            continue
        positions = [p for node in nodes for p in operator().mutation_positions(node)]
        for occurrence, ((line, _), _) in enumerate(positions):
            code = mutate_code(source, operator(), occurrence)
            if line not in ignored and code is not None and code not in seen:
                seen.add(code)
                yield Mutant(module, line, name.partition("/")[2], code)


def lines_without_effect(source: str) -> set[int]:
    """Return lines of imports, raise statements, decorators, signatures and bare fields."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_bare = isinstance(node, ast.AnnAssign) and node.value is None
        if is_bare or isinstance(node, ast.ImportFrom | ast.Import | ast.Raise):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            lines |= {decorator.lineno for decorator in node.decorator_list}
            lines |= set(range(node.lineno, node.body[0].lineno)) - {node.body[0].lineno}
    return lines


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """Yield a copy of the checkout's sources, which is the working directory."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        for part in COPIED:
            source = ROOT / part
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "runs", "adapter")
                shutil.copytree(source, folder / part, ignore=ignored, symlinks=True)
            else:
                shutil.copy(source, folder / part)
        os.chdir(folder)
        sys.path[:] = [str(folder), *(path for path in sys.path if Path(path or ".") != ROOT)]
        os.environ["PYTHONPATH"] = str(folder)
        yield folder


def warm_up() -> None:
    """Import the tests' third-party modules, and exempt them from garbage collection."""
    for name in WARM:
        importlib.import_module(name)
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    gc.freeze()


def passes(tests: Sequence[str], seconds: float) -> bool:
    """Whether the tests pass within `seconds`, in a forked process."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutation tests; returns 0 if a share of at least `--bar` was detected."""
    parser = argparse.ArgumentParser(description="Mutation tests of the core modules.")
    modules = list(CORE_MODULES)
    parser.add_argument("modules", nargs="*", default=modules, help="of those in CORE_MODULES")
    parser.add_argument("--sample", type=int, default=12, help="mutants of each module; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bar", type=float, default=0.95, help="share of mutants to detect")
    args = parser.parse_args(arguments)
    warm_up()
    num_found, survivors = 0, []
    with copied() as folder:
        for module in args.modules:
            path = folder / module
            original = path.read_text(encoding="utf-8")
            start = time.monotonic()
            if not passes(CORE_MODULES[module], math.inf):
                sys.exit(f"{module}: {' '.join(CORE_MODULES[module])} fail without any change")
            seconds = TIMEOUT_S + TIMEOUT_FACTOR * (time.monotonic() - start)
            mutants = list(mutants_of(module, original))
            draw = random.Random(f"{args.seed} {module}")
            chosen = draw.sample(mutants, min(args.sample or len(mutants), len(mutants)))
            before = len(survivors)
            for mutant in chosen:
                path.write_text(mutant.code, encoding="utf-8")
                if passes(CORE_MODULES[module], seconds):
                    survivors.append(mutant)
                    say(f"{module}:{mutant.line} {mutant.operator}\n{mutant.diff(original)}")
            path.write_text(original, encoding="utf-8")
            found = len(chosen) - (len(survivors) - before)
            num_found += found
            say(f"{module}: {found} of {len(chosen)} found ({len(mutants)} possible)")
    total = num_found + len(survivors)
    share = num_found / max(total, 1)
    say(f"{num_found} of {total} found ({share:.1%}), seed {args.seed}")
    return 0 if share >= args.bar else 1


def say(text: str) -> None:
    """Print and flush, since a run takes long."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
