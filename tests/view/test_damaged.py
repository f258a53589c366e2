"""Damaged and foreign files of a run end in a refusal or in what can be shown."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from search_r1.experimental.replay.replaying import read_run_config
from search_r1.view.app import Runs
from search_r1.view.run import MetricsLog, Run, read_config
from tests.view.damaged import BOMB, LINES, MERGES, configs
from verl.errors import ConfigError, UserError
from verl.yaml_files import read_yaml

CONFIGS = list(configs())


@pytest.mark.parametrize("content", CONFIGS, ids=range(len(CONFIGS)))
def test_every_config_is_read_or_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    """The message is short, whatever the file contains."""
    (tmp_path / "config.yaml").write_bytes(content)
    try:
        read_config(tmp_path)
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000


@pytest.mark.parametrize("content", [b"a: 1", b"agent: {}", b"trainer: {guard: {patience: 3}}"])
def test_what_is_read_is_shown_and_replayed_or_refused(
    folder: Path, open_run: Callable[[Path], Run], content: bytes
) -> None:
    """Foreign options are no traceback."""
    (folder / "config.yaml").write_bytes(content)
    runs = Runs([open_run(folder)])
    for shown in (runs.summaries, runs.names):
        orjson.dumps(shown())
    with contextlib.suppress(UserError):
        read_run_config(folder)


@pytest.mark.parametrize("content", [BOMB, MERGES])
def test_aliases_are_counted_before_they_are_expanded(tmp_path: Path, content: bytes) -> None:
    """A kilobyte that means 9^11 values is refused at once."""
    (tmp_path / "a.yaml").write_bytes(content)
    start = time.process_time()
    with pytest.raises(ValueError, match="values"):
        read_yaml(tmp_path / "a.yaml")
    assert time.process_time() - start < 1


def test_aliases_of_an_ordinary_file_are_read(tmp_path: Path) -> None:
    """Anchors and merges are used in hand-written files."""
    (tmp_path / "a.yaml").write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\nd: 2026-01-02")
    expected = {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}] * 2, "d": "2026-01-02"}
    assert read_yaml(tmp_path / "a.yaml") == expected


def test_damaged_lines_of_metrics_do_not_hide_the_others(
    folder: Path, open_run: Callable[[Path], Run]
) -> None:
    """Each line is read alone; what is shown is JSON."""
    sound = [b'{"step": 1, "b": 2.0}', b'{"step": 2, "b": 3.0}']
    (folder / "metrics.jsonl").write_bytes(b"\n".join([sound[0], *LINES, sound[1], b'{"step": 3']))
    run = open_run(folder)
    assert run.metrics.curve("b") == ([1, 2], [2.0, 3.0])
    runs = Runs([run])
    for shown in (runs.summaries, runs.names, lambda: runs.curves(runs.names())):
        json.loads(orjson.dumps(shown()))


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """It is named."""
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=r"config\.yaml: got"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: got"):
        MetricsLog(tmp_path / "metrics.jsonl").refresh()
