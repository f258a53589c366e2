"""Which base models an adapter is merged into."""

import json
import logging
from pathlib import Path

import pytest

from verl.errors import ModelError
from verl.ext.lora.base import BASE_FILE, check_base, write_base
from verl.model_files import are_other_weights, weights_fingerprint


def model(folder: Path, content: bytes, file: str = "model.safetensors") -> Path:
    folder.mkdir()
    (folder / file).write_bytes(content)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The model that the adapters of these tests were trained on."""
    return model(tmp_path / "base", b"weights")


@pytest.fixture
def others(tmp_path: Path) -> dict[str, Path]:
    """Models that differ from the base, or may be the same one written in another way."""
    return {
        "weights": model(tmp_path / "weights", b"WEIGHTS"),
        "size": model(tmp_path / "size", b"weights in another dtype"),
        "file": model(tmp_path / "file", b"weights", "model-00001-of-00001.safetensors"),
    }


def outcome(adapter: Path, base: Path, named: str, caplog: pytest.LogCaptureFixture) -> str:
    """Return whether a base is refused, warned of, or taken without a word."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        try:
            check_base("--adapter A", adapter, base, named)
        except ModelError:
            return "refused"
    return "warned" if caplog.records else "taken"


def test_other_weights_than_a_run_trained_on_are_refused(
    base: Path, others: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning is enough where they may be the same weights in other files."""
    write_base(tmp_path, str(base))
    found = {name: outcome(tmp_path, path, "", caplog) for name, path in others.items()}
    assert found == {"weights": "refused", "size": "warned", "file": "warned"}
    assert outcome(tmp_path, base, str(others["weights"]), caplog) == "taken"
    earlier = {"fingerprint": weights_fingerprint(str(base), "of before 2026-11-30")}
    (tmp_path / BASE_FILE).write_text(json.dumps(earlier))
    assert outcome(tmp_path, base, "", caplog) == "taken"
    assert outcome(tmp_path, others["weights"], "", caplog) == "warned"


def test_of_an_adapter_of_peft_only_the_named_folder_is_known(
    base: Path, others: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is warned of if its weights certainly differ, and nothing is refused."""
    found = {name: outcome(tmp_path, path, str(base), caplog) for name, path in others.items()}
    assert found == {"weights": "warned", "size": "taken", "file": "taken"}
    for named in ("", "owner/name", str(tmp_path / "gone"), str(tmp_path)):
        assert outcome(tmp_path, base, named, caplog) == "taken"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"fingerprint": '])
def test_a_damaged_record_is_refused(base: Path, tmp_path: Path, content: str) -> None:
    """In one line that names it."""
    (tmp_path / BASE_FILE).write_text(content)
    with pytest.raises(ModelError, match=f"--adapter A: got .*{BASE_FILE}") as caught:
        check_base("--adapter A", tmp_path, base, "")
    assert "\n" not in str(caught.value)


def test_a_base_without_files_leaves_no_record(base: Path, tmp_path: Path) -> None:
    """Its name, which the adapter's own config has, says what it is; an older record goes."""
    write_base(tmp_path, str(base))
    write_base(tmp_path, "owner/name")
    assert not (tmp_path / BASE_FILE).exists()


def test_only_the_same_files_show_that_weights_differ() -> None:
    """Fingerprints of an earlier form say nothing of the files."""
    assert are_other_weights("2:aa:11", "2:aa:22")
    for first, second in (("2:aa:11", "2:aa:11"), ("2:aa:11", "2:bb:22"), ("9a", "9b"),
                          ("2:aa:11", "9a"), ("owner/a", "owner/b")):  # fmt: skip
        assert not are_other_weights(first, second)
