"""Which changes the manifest of an evaluation shows."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from search_r1.evaluation.manifest import build_manifest
from search_r1.evaluation.options import EvaluationOptions
from search_r1.evaluation.shown_tools import ENTRY, schemas_of
from search_r1.evaluation.store import differences
from search_r1.inference.building import run_config


@pytest.fixture
def world(tmp_path: Path) -> dict[str, Any]:
    """Options that name a model folder and a data file with arbitrary bytes."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text(name)
    (tmp_path / "dev.jsonl").write_text("rows")
    return {"model": str(tmp_path), "data": (str(tmp_path / "dev.jsonl"),), "out": "o"}


def manifest(
    world: dict[str, Any], facts: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    options = EvaluationOptions(**world | more)
    config = run_config(options, world["model"])
    return build_manifest(options, config, facts or {"retriever": "empty"}, 1, "float32")


def test_hashes_are_of_the_bytes(world: dict[str, Any]) -> None:
    """Data, weights and tokenizer are hashed with SHA-256."""
    found = manifest(world)
    assert found["data"]["files"] == {"dev.jsonl": hashlib.sha256(b"rows").hexdigest()}
    weights = hashlib.sha256(b"model.safetensors").hexdigest()
    assert found["model"]["files"]["model.safetensors"] == weights
    assert list(found["model"]["tokenizer"]) == ["tokenizer.json"]


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"temperature": 0.5}, "decoding.temperature"),
        ({"seed": 1}, "decoding.seed"),
        ({"max_turns": 7}, "decoding.max_turns"),
        ({"topk": 7}, "decoding.topk"),
        ({"template": "short"}, "template.sha256"),
        ({"template": "native", "tools": ("search", "visit")}, "tools"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "template.sha256"),
        ({"method": "cot"}, "method"),
        ({"untagged": "read"}, "decoding.untagged"),
        ({"num_rows": 1}, "data.chosen"),
        ({"engine": "transformers"}, "engine.name"),
        ({"facts": {"retriever": "bm25"}}, "retriever.retriever"),
        ({"judge_url": "http://j", "judge_model": "m"}, "judge"),
    ],
)
def test_whatever_decides_an_answer_is_told_apart(
    world: dict[str, Any], more: dict[str, Any], where: str
) -> None:
    """Every option that affects answers or scores changes the manifest."""
    changed = differences(manifest(world), manifest(world, **more))
    assert where in {line.partition(":")[0] for line in changed}


def test_other_bytes_are_another_model_and_other_data(world: dict[str, Any]) -> None:
    """Changed file contents change the hashes."""
    before = manifest(world)
    (Path(world["model"]) / "model.safetensors").write_text("other")
    Path(world["data"][0]).write_text("other")
    changed = " ".join(differences(before, manifest(world)))
    assert "model.sha256" in changed
    assert "data.files.dev.jsonl" in changed


def test_speed_alone_is_not_told_apart(world: dict[str, Any]) -> None:
    """Addresses, concurrency and folders do not change the manifest."""
    other = manifest(world, concurrency=3, retriever_url="http://other:1", out="elsewhere")
    assert differences(manifest(world), other) == []


def test_an_endpoint_is_named_and_its_key_is_not(
    world: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint is recorded without weight hashes and without secrets."""
    monkeypatch.setenv("KEY", "secret")
    found = manifest(world, endpoint="http://e", served_model="m", judge_url="http://j",
                     judge_model="j", judge_api_key_env="KEY")  # fmt: skip
    assert (found["model"]["endpoint"], found["model"]["served_model"]) == ("http://e", "m")
    assert "files" not in found["model"]
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"template": "native"}, None),
        ({"template": "native", "tools": ("search", "visit")}, ["search", "visit"]),
        ({"template": "native", "tools": ("search", "visit"), "method": "rag"}, None),
        ({"template": "tools", "tools": ("search", "visit")}, None),
    ],
)
def test_tools_that_a_chat_template_shows_are_recorded(
    world: dict[str, Any], more: dict[str, Any], expected: list[str] | None
) -> None:
    """Their schemas, unless they are the default, so that older manifests stay equal."""
    found = manifest(world, **more)
    assert (ENTRY in found) is (expected is not None)
    shown = [s["function"]["name"] for s in schemas_of(found)]
    is_native = found["template"]["name"] == "native"
    assert shown == (expected or ["search"] if is_native else [])


LOOKUP = '''
def lookup(query: str) -> str:
    """Looks something up.

    Args:
        query: What.
    """
    return "ANSWER"
'''


def test_an_own_tool_is_known_by_the_bytes_of_its_file(world: dict[str, Any]) -> None:
    """Another content is another tool; the same one elsewhere is not."""
    paths = [Path(world["model"]) / name / "a.py" for name in ("one", "copy", "changed")]
    found = []
    for path, answer in zip(paths, ("one", "one", "two"), strict=True):
        path.parent.mkdir()
        path.write_text(LOOKUP.replace("ANSWER", answer))
        tools = ("search", f"{path}:lookup")
        found.append(manifest(world, template="tools", tools=tools, trust_remote_code=True))
    one, copy, changed = found
    digest = hashlib.sha256(paths[0].read_bytes()).hexdigest()
    assert one["tools"] == ["search", f"a.py:lookup sha256 {digest}"]
    assert differences(one, copy) == []
    assert [line.partition(":")[0] for line in differences(one, changed)] == ["tools"]


@pytest.mark.parametrize("method", ["agent", "direct", "rag"])
def test_default_tools_and_those_that_are_not_called_are_left_out(
    world: dict[str, Any], method: str
) -> None:
    """So that manifests without the entry, as they were before, stay equal."""
    assert "tools" not in manifest(world, method=method)
    assert "tools" not in manifest(world, method=method, tools=("search",))
    more = manifest(world, method=method, tools=("search", "visit"), template="tools")
    assert more.get("tools") == (["search", "visit"] if method == "agent" else None)
