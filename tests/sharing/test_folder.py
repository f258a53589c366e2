"""`search-r1 push`: what is written and uploaded, what the card says, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants, get_token
from transformers import AutoModelForCausalLM

from search_r1.cli import main
from search_r1.evaluation.manifest import weights_digest
from search_r1.evaluation.report import write_report
from search_r1.evaluation.store import Store
from search_r1.inference.model import model_folder
from tests.bad_models import whole_model
from tests.evaluation.scripted import sample
from tests.evaluation.test_tables import MANIFEST
from tests.hub import serving_hub
from verl.config import Config
from verl.config.cli import public_options
from verl.ports import free_port

SETTINGS = {
    "template": "template.yaml", "tools": ["search"], "max_turns": 3, "topk": 2,
    "agent": "dialogue",
}  # fmt: skip
EM = (1.0, 1.0, 0.0, 1.0)
SECRET = re.compile(r"/home|secret|10\.0\.0\.7")
"""What of the run's options is nobody's business."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of 8 steps, as training writes it."""
    folder = tmp_path / "runs" / "mine"
    whole_model(folder / "model")
    (folder / "model" / "search_r1.json").write_text(json.dumps(SETTINGS))
    (folder / "model" / "template.yaml").write_text("instruction: '{question}'\n")
    config: Any = Config()
    config.data.train_files = ["/home/me/secret/train.parquet", "me/questions@v1:train"]
    config.data.val_files = "/home/me/secret/val.parquet"
    config.actor_rollout_ref.model.path = "/home/me/secret/base"
    config.reward_model.name = "/home/me/reward.py:Mine"
    config.retriever.url = "http://10.0.0.7:8000/retrieve"
    (folder / "config.yaml").write_text(yaml.safe_dump(public_options(config)))
    rows = [{"step": 0, "val/em": 0.25}, {"step": 3, "actor/lr": 1.0}, {"step": 8, "val/em": 0.5},
            {"step": 8, "val/em": 0.75}]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    step = folder / "global_step_8"
    step.mkdir()
    state = {"fingerprints": {"corpus": "c0ffee", "mine": "abc"}}
    (step / "trainer_state.json").write_text(json.dumps(state))
    (folder / "validation").mkdir()
    dialogues = [{"data_source": "ab"[i % 2], "em": em} for i, em in enumerate(EM)]
    lines = "".join(f"{json.dumps(dialogue)}\n" for dialogue in dialogues)
    (folder / "validation" / "step_8.jsonl").write_text(lines)
    return folder


def evaluated(run: Path, out: Path, digest: str) -> Path:
    """Write a finished evaluation of the weights with this digest."""
    model = {**MANIFEST["model"], "name": "/home/me/secret/model", "sha256": digest}
    data = {**MANIFEST["data"], "num_rows": len(EM)}
    with Store(out, {**MANIFEST, "model": model, "data": data}) as store:
        for number, em in enumerate(EM):
            store.append(sample(f"f#{number}", em))
    write_report(out)
    return out


def test_a_folder_has_the_model_its_settings_and_a_card_of_what_the_run_wrote(
    run: Path, tmp_path: Path
) -> None:
    """It loads as it was; a value is read back by the hub's library; nothing private is in it."""
    out, evaluation = tmp_path / "out" / "shared", tmp_path / "evaluation"
    evaluated(run, evaluation, weights_digest(run / "model"))
    assert main(["push", str(run), "--out", str(out), "--evaluations", str(evaluation)]) == 0
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder) for folder in (run / "model", out))
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name
    assert json.loads((out / "search_r1.json").read_text()) == SETTINGS
    card = ModelCard.load(out / "README.md")
    assert (card.data.base_model, card.data.license) == (None, None)
    assert card.data.datasets == ["me/questions"]
    found = {(r.dataset_name, r.metric_type): r.metric_value for r in card.data.eval_results}
    assert found[("all sets", "exact_match")] == 0.75 and found[("b", "exact_match")] == 1.0
    assert found[("all rows", "exact_match")] == 0.75  # of the evaluation
    for part in (
        "| 0 | 0.250 |\n| 8 | 0.750 |", "after step 8", "`c0ffee`", "| mine | `abc` |",
        "| all sets | em | 0.750 [0.250, 1.000] | 4 |", "train.parquet", "reward.py:Mine",
    ):  # fmt: skip
        assert part in card.text, part
    assert not SECRET.search((out / "README.md").read_text())


@pytest.mark.parametrize(
    ("stored", "shared"),
    [
        ("dialogue", "dialogue"),
        ("/home/me/secret/agent.py:Mine", "agent.py:Mine"),
        ("loop:/home/me/secret/loop.py:play", "loop:loop.py:play"),
        ("openenv:http://10.0.0.7:8000", "openenv:URL"),
        ("package.module:Mine", "package.module:Mine"),
    ],
)
def test_where_code_and_servers_are_is_not_shared(
    stored: str, shared: str, run: Path, tmp_path: Path
) -> None:
    """Neither the folders of the user's own files nor addresses."""
    settings = {**SETTINGS, "agent": stored, "tools": ["search", "/home/me/secret/tools.py:add"]}
    (run / "model" / "search_r1.json").write_text(json.dumps(settings))
    out = tmp_path / "out"
    assert main(["push", str(run), "--out", str(out)]) == 0
    written = json.loads((out / "search_r1.json").read_text())
    assert written == settings | {"agent": shared, "tools": ["search", "tools.py:add"]}
    for name in ("search_r1.json", "README.md"):
        assert not SECRET.search((out / name).read_text())


def test_a_pushed_model_is_read_from_the_hub(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name, with template and settings, from a server with the hub's API."""
    files: dict[str, bytes] = {}
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving_hub(files) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert get_token() == "hf_mine"
        assert main(["push", str(run), "--to", "me/mine", "--base-model", "you/base"]) == 0
    assert capsys.readouterr().out == f"{address}/me/mine\n"
    assert {name.rpartition("/")[2] for name in files} >= {
        path.name for path in (run / "model").iterdir()
    } | {"README.md"}
    card = ModelCard(files["me/mine/README.md"].decode())
    assert card.data.base_model == "you/base" and "--model me/mine" in card.text
    out = tmp_path / "back"
    out.mkdir()
    for name, content in files.items():
        (out / name.rpartition("/")[2]).write_bytes(content)
    with model_folder(str(out), "float32") as folder:
        assert weights_digest(folder) == weights_digest(run / "model")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["{run}"], "neither --to nor --out"),
        (["{run}", "--to", "a/b", "--out", "{out}"], "both"),
        (["{run}/global_step_8", "--out", "{out}"], "an incomplete checkpoint"),
        (["{run}/model", "--out", "{out}"], "the folder of a run"),
        (["{run}", "--out", "{run}"], "a new folder"),
        (["{run}", "--out", "{out}", "--adapter"], "lora_rank"),
        (["{run}", "--to", "a/b/c"], "a name of the hub"),
        (["{run}", "--to", "a/b"], "does not answer"),
        (["{run}", "--out", "{out}", "--evaluations", "{other}"], "other weights"),
    ],
)
def test_mistakes_are_refused_and_nothing_is_left(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], expected: str,
) -> None:  # fmt: skip
    """Each with its fix; the hub is at a port at which nothing listens."""
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    out, other = tmp_path / "shared", tmp_path / "other"
    if "{other}" in words:
        evaluated(run, other, "0" * 64)
    places = {"run": run, "out": out, "other": other}
    assert main(["push", *(word.format(**places) for word in words)]) == 2
    message = capsys.readouterr().err
    assert expected in message and "fix: " in message
    assert not out.exists()
