"""The way of weights by files, and a transport of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.config import Config
from verl.single_controller.actors import ActorLocation
from verl.weights.files import Files, selected_transport


class Nodes:
    """Four ranks on two nodes, of which the slowest takes 2.5 s; also the engines there."""

    dtype, loading = "bfloat16", (3,)

    def __init__(self) -> None:
        self.group: Any = self
        self.written: list[Any] = []
        self.loaded: list[tuple[Sequence[str], int]] = []

    def locations(self) -> list[ActorLocation]:
        return [ActorLocation(node, "host", ()) for node in ("one", "one", "two", "two")]

    def scatter(self, method: str, folders: Sequence[str], *options: Any) -> list[float]:
        assert method == "sender.write"
        self.written += [folders, options]
        return [1.5, 0.0, 2.5, 0.0]

    def load(self, sources: Sequence[str], version: int) -> None:
        self.loaded.append((sources, version))


def test_every_node_reads_what_its_ranks_wrote(tmp_path: Path) -> None:
    """Versions that are still loading are kept; new engines read the last one again."""
    config = Config()
    config.actor_rollout_ref.rollout.server = {"weights_dir": str(tmp_path)}
    files, nodes = Files(config), Nodes()
    files.resend(nodes)
    assert nodes.loaded == []
    assert files.send(nodes, nodes, 4)["write"] == 2.5
    folders, options = nodes.written
    assert options == (4, (3,), "bfloat16")
    assert {str(Path(folder).parent) for folder in folders} == {str(tmp_path)}
    assert len(set(folders)) == 2
    files.resend(nodes)
    assert nodes.loaded == [([f"{folder}/4" for folder in folders], 4)] * 2


def test_a_transport_of_the_user_is_named_by_its_file(tmp_path: Path) -> None:
    """As an engine is."""
    path = tmp_path / "mine.py"
    path.write_text("from verl.weights.files import Files\nclass Mine(Files): pass\n")
    config = Config()
    config.actor_rollout_ref.rollout.weight_sync = f"{path}:Mine"
    assert issubclass(selected_transport(config), Files)
