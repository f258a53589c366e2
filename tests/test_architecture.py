"""The direction of imports that docs/explanation/architecture.md states, and the size of files."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPOSITION_ROOTS = {"verl/trainer/run.py", "verl/trainer/build.py"}
DOORS = {"verl/doctor.py", "verl/trainer/sft.py", "verl/trainer/rejection_sampling.py"}
"""Commands by the paths that users know; their code is in `verl/ext`."""
PURE = {
    "verl/core_algos/jagged.py": {"torch"},
    "verl/core_algos/advantages.py": {"torch"},
    "verl/core_algos/groups.py": {"torch"},
    "verl/core_algos/kl.py": {"torch"},
    "verl/core_algos/losses.py": {"torch"},
    "verl/core_algos/mismatch.py": {"torch"},
    "verl/core_algos/policy_losses.py": {"torch"},
    "verl/core_algos/shaping.py": {"torch"},
    "verl/types.py": set[str](),
    "verl/agent/grammar.py": {"functools", "re"},
}
TOP_LEVEL = {
    "verl", "search_r1", "scripts", "example", "docs", "tests", "benchmarks", "train_ppo.sh",
    "train_grpo.sh", "retrieval_launch.sh", "infer.py", "train.py", "evaluate.py", "setup.py",
    "pyproject.toml", "Makefile", "requirements.txt", "requirements.lock", "requirements.sha256",
    "README.md", "LICENSE", "README_zh.md", "mkdocs.yml",
    "AGENTS.md", "ATTRIBUTIONS.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", ".ci",
    "Dockerfile", ".dockerignore", "compose.yaml", "compose.gpu.yaml", ".devcontainer",
}  # fmt: skip
SHARED = (
    "verl.errors",
    "verl.bounds",
    "verl.file_kinds",
    "verl.files",
    "verl.hub_access",
    "verl.logs",
    "verl.machine",
    "verl.plugins",
    "verl.ports",
    "verl.user_files",
)
"""Of verl, what the retriever has in common with the trainer."""
HEAVY = {"torch", "ray", "numpy", "transformers", "search_r1"}
STANDARD = {
    "__future__",
    "array",
    "collections",
    "dataclasses",
    "enum",
    "heapq",
    "itertools",
    "types",
    "typing",
}


def sources() -> list[Path]:
    folders = ("verl", "search_r1", "example", "scripts", "benchmarks", "tests")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def imported(path: Path) -> set[str]:
    """Return the full names of the modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def imported_from_root(path: Path) -> set[str]:
    """Return the packages that a file imports as `from verl import NAME`."""
    nodes = ast.walk(ast.parse(path.read_text()))
    found = (n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "verl")
    return {alias.name for node in found for alias in node.names}


def starts(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def offenders(folder: str, *forbidden: str, allowed: Collection[str] = ()) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in COMPOSITION_ROOTS | DOORS
        for name in sorted(imported(path))
        if name not in allowed and any(starts(name, package) for package in forbidden)
    ]


def test_verl_knows_nothing_of_search() -> None:
    """Only the composition root joins trainer and agent."""
    assert offenders("verl", "search_r1", "example", "scripts") == []


def test_verl_hardly_speaks_of_search() -> None:
    """verl mentions search only in names of options and metrics that users know.

    Regular expressions, Hydra's search path and the product's name do not count.
    """
    other = re.compile(r"\.search\(|search.?path|search[-_]r1", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in sorted((ROOT / "verl").rglob("*.py"))
        if str(path.relative_to(ROOT)) not in COMPOSITION_ROOTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"retriev|search", other.sub("", line), re.IGNORECASE)
    ]
    assert len(found) <= 15, "\n".join(found)


def test_no_two_packages_of_verl_import_each_other() -> None:
    """Each package can be read after those that it imports: there are no cycles."""
    imports: dict[str, set[str]] = {}
    for path in (ROOT / "verl").rglob("*.py"):
        own = path.relative_to(ROOT / "verl").with_suffix("").parts[0]
        names = {name.split(".")[1] for name in imported(path) if name.startswith("verl.")}
        if str(path.relative_to(ROOT)) in COMPOSITION_ROOTS | DOORS:
            names.discard("ext")
        imports.setdefault(own, set()).update(names | imported_from_root(path))
    mutual = {
        tuple(sorted((one, other)))
        for one, names in imports.items()
        for other in names - {one}
        if one in imports.get(other, set())
    }
    assert mutual == set()


def test_the_retriever_stands_alone() -> None:
    """The server imports no trainer, agent, Ray or vLLM, only shared modules that import none."""
    found = offenders(
        "search_r1/retrieval", "verl", "ray", "vllm", "example", "scripts",
        "search_r1.agent", "search_r1.rewards", allowed=SHARED,
    )  # fmt: skip
    assert found == []
    code = f"import sys, {', '.join(SHARED)}; print({HEAVY} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_an_actor_starts_without_torch() -> None:
    """An actor reports its location quickly, and imports heavy modules only when it builds."""
    code = "import sys, verl.single_controller.actors; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_mistakes_are_told_without_torch() -> None:
    """A wrong retriever, model or file of a command is refused before seconds of imports."""
    modules = ("search_r1.inference.command", "search_r1.evaluation.command",
               "search_r1.agent_server.service", "search_r1.view.running")  # fmt: skip
    slow = {"torch", "ray", "transformers", "scipy", "pandas"}
    code = f"import sys, {', '.join(modules)}; print({slow} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_rewards_read_plain_text() -> None:
    """Rewards import neither torch nor the trainer; of verl, file loader, errors and proxies."""
    allowed = ("verl.errors", "verl.plugins", "verl.proxies")
    found = offenders("search_r1/rewards", "torch", "verl", "ray", "transformers", allowed=allowed)
    assert found == []


def test_agents_do_not_reach_into_the_trainer() -> None:
    """The dialogue loop imports protocol and options, not the trainer, its workers or Ray."""
    forbidden = ("verl.trainer", "verl.training", "verl.single_controller", "ray", "vllm")
    assert offenders("search_r1/agent", *forbidden) == []
    forbidden += ("verl.rollout", "transformers")
    assert offenders("verl/agent", *forbidden) == []


def test_evaluation_is_no_part_of_training() -> None:
    """Evaluation shares configuration, data, checkpoints and rollout, not the trainer or Ray."""
    forbidden = ("verl.trainer", "verl.single_controller", "ray", "example", "scripts")
    assert offenders("search_r1/evaluation", *forbidden) == []


@pytest.mark.parametrize(("folder", "package"), [
    ("search_r1/environments/", "search_r1.environments"),
    ("search_r1/gateway/", "search_r1.gateway"),
    ("search_r1/online/", "search_r1.online"), ("search_r1/view/", "search_r1.view"),
    ("search_r1/experimental/", "search_r1.experimental"), ("search_r1/compat/", "searchr1"),
    ("verl/ext/", "verl.ext"),
])  # fmt: skip
def test_nothing_imports_an_optional_package(folder: str, package: str) -> None:
    """Commands and options name its modules as text, so that it may be deleted."""
    found = [
        line for top in ("verl", "search_r1", "tests/core") for line in offenders(top, package)
    ]
    assert [line for line in found if not line.startswith(folder)] == []
    if folder != "verl/ext/":  # the composition roots import extensions
        for root in COMPOSITION_ROOTS:
            assert not any(starts(name, package) for name in imported(ROOT / root))


def test_asking_knows_one_dialogue_only() -> None:
    """Evaluation and the agent server import `inference`, which imports neither of them."""
    forbidden = ("verl.trainer", "verl.single_controller", "ray", "example", "scripts",
                 "search_r1.evaluation", "search_r1.agent_server")  # fmt: skip
    assert offenders("search_r1/inference", *forbidden) == []


def test_measures_and_intervals_are_plain_numbers() -> None:
    """Measures and intervals import no tensor library."""
    for name in ("samples", "measures", "summary"):
        names = imported(ROOT / f"search_r1/evaluation/{name}.py")
        assert not any(starts(m, p) for m in names for p in ("torch", "transformers")), name


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_import_tensors_only(name: str) -> None:
    """The maths and the protocol import no configuration, no Ray and no I/O."""
    modules = {m for m in imported(ROOT / name) if not m.startswith("verl.core_algos.")}
    tops = {module.split(".")[0] for module in modules}
    assert tops <= PURE[name] | STANDARD


def test_no_file_is_over_500_lines() -> None:
    """A longer file should be split."""
    long = {str(p): n for p in sources() if (n := len(p.read_text().splitlines())) > 500}
    assert long == {}


def test_every_file_says_what_lives_in_it() -> None:
    """Each module of the product has a docstring."""
    product = [p for p in sources() if p.relative_to(ROOT).parts[0] != "tests"]
    assert [str(p) for p in product if not ast.get_docstring(ast.parse(p.read_text()))] == []


def broad_handlers(path: Path) -> list[ast.ExceptHandler]:
    """Return the handlers of any exception that do not raise it again, whatever it is."""
    handlers = (
        h for h in ast.walk(ast.parse(path.read_text())) if isinstance(h, ast.ExceptHandler)
    )
    broad = re.compile(r"\b(Base)?Exception\b")
    return [
        h for h in handlers
        if (h.type is None or broad.search(ast.unparse(h.type)))
        and not isinstance(h.body[-1], ast.Raise)
    ]  # fmt: skip


def test_every_broad_except_says_why() -> None:
    """It also swallows errors that are not meant, so a comment says why that is right."""
    silent = []
    for path in sources():
        lines = path.read_text().splitlines()
        for handler in broad_handlers(path):
            beside = lines[handler.lineno - 2 : handler.body[0].lineno - 1]
            if not any(re.search(r"#(?! noqa: BLE001$)", line) for line in beside):
                silent.append(f"{path.relative_to(ROOT)}:{handler.lineno}")
    assert silent == []


def test_the_top_level_holds_nothing_but_the_project() -> None:
    """Files that a run leaves in the top folder are not committed by mistake."""
    words = ["git", "-C", str(ROOT), "ls-files"]
    listed = subprocess.run(words, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert found <= TOP_LEVEL | {name for name in found if name.startswith((".git", ".pre-commit"))}
