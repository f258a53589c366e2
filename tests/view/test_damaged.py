"""Damaged and foreign files of a run end in a refusal or in what can be shown."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from search_r1.experimental.replay.weights import read_run_config
from search_r1.view.app import Runs
from search_r1.view.run import MetricsLog, Run
from tests.runs.damaged import LINES
from verl.errors import ConfigError, UserError


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
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        MetricsLog(tmp_path / "metrics.jsonl").refresh()
