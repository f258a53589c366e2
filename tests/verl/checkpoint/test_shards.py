"""Checkpoints of one and two real ranks: complete, exact, and resumed as if never stopped."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from tests.core.batches import make_batch
from tests.verl.training import rank_bodies
from tests.verl.training.ranks import run_ranks, save_tiny
from verl.checkpoint import folders
from verl.checkpoint.exporting import export
from verl.packing import split_by_work


def publish(root: Path) -> None:
    """Publish the checkpoint as the driver does when all ranks have written."""
    folders.write_state(root / "global_step_3.tmp", {"config": {}})
    (root / "global_step_3.tmp" / folders.MARKER).touch()
    os.replace(root / "global_step_3.tmp", root / "global_step_3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The same training on one rank and on two, each with a checkpoint."""
    root = tmp_path_factory.mktemp("runs")
    model = save_tiny(root / "model")
    found = SimpleNamespace(model=model, root=root)
    for size, name in ((1, "one"), (2, "two")):
        out = root / name
        answers = run_ranks(size, rank_bodies.train, model, str(out))
        publish(out)
        setattr(found, name, answers)
    return found


def test_two_ranks_train_as_one_does(runs: SimpleNamespace) -> None:
    """Losses, gradient norms and updated weights do not depend on the number of ranks."""
    for one, two in zip(runs.one[0]["metrics"], runs.two[0]["metrics"], strict=True):
        uneven = {k for k in one if k.endswith(("num_micro_batches", "computed_token_share"))}
        assert {k: v for k, v in two.items() if k not in uneven} == pytest.approx(
            {k: v for k, v in one.items() if k not in uneven}, rel=1e-4, abs=1e-6
        )
    assert runs.two[0]["metrics"] == runs.two[1]["metrics"]
    one, two = (load_file(runs.root / n / "weights/model.safetensors") for n in ("one", "two"))
    assert one.keys() == two.keys()
    for name, x in one.items():
        torch.testing.assert_close(two[name], x, rtol=1e-3, atol=2e-4)


def test_two_ranks_compute_as_one_does(runs: SimpleNamespace) -> None:
    """Log-probs and values of shards equal those of the whole batch; the reference is frozen."""
    parts = split_by_work(make_batch(rank_bodies.LENGTHS, 0), 2).parts
    for name, tol in (("log_probs", 1e-4), ("values", 1e-3)):
        whole = torch.split(runs.one[0][name], rank_bodies.LENGTHS)
        for rank, part in enumerate(parts):
            expected = torch.cat([whole[i] for i in part])
            torch.testing.assert_close(runs.two[rank][name], expected, rtol=tol, atol=tol)
    assert torch.equal(runs.one[0]["log_probs"], runs.one[0]["ref_log_probs"])


@pytest.mark.parametrize("saved", ["one", "two"])
def test_line_21_a_resumed_run_goes_on_as_if_never_stopped(
    runs: SimpleNamespace, saved: str
) -> None:
    """The next update has the same metrics, also with another number of ranks."""
    root = runs.root / saved
    resumed = run_ranks(1, rank_bodies.resume, runs.model, str(root))
    assert resumed[0]["random"] == getattr(runs, saved)[0]["random"]
    exact = saved == "one"
    for found, expected in zip(resumed[0]["next"], getattr(runs, saved)[0]["next"], strict=True):
        keys = [k for k in found if not k.endswith(("num_micro_batches", "computed_token_share"))]
        tolerance = {"rel": 0, "abs": 0} if exact else {"rel": 1e-4, "abs": 1e-6}
        assert [found[k] for k in keys] == pytest.approx([expected[k] for k in keys], **tolerance)
    before = load_file(root / "weights/model.safetensors")
    after = load_file(root / "resumed_1/model.safetensors")
    assert all(torch.equal(after[name], x) for name, x in before.items())


@pytest.mark.parametrize("method", ["shared", "sent"])
@pytest.mark.parametrize("size", ["one", "two"])
def test_engines_receive_the_saved_weights(runs: SimpleNamespace, size: str, method: str) -> None:
    """Engines receive the saved weights, whether each rank writes a part or one rank sends all.

    Casting them before they are gathered gives the same bits as casting them afterwards.
    """
    saved = load_file(runs.root / size / "weights/model.safetensors")
    shared = getattr(runs, size)[0][method]
    assert shared.keys() == saved.keys()
    assert all(torch.equal(shared[name], x.bfloat16()) for name, x in saved.items())


def test_export_is_a_folder_that_transformers_loads(runs: SimpleNamespace, tmp_path: Path) -> None:
    """The export of two ranks' shards has the weights they saved, and needs no rank."""
    out = export(runs.root / "two/global_step_3", tmp_path / "hf", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    expected = load_file(runs.root / "two/weights/model.safetensors")
    for name, x in model.named_parameters():
        assert torch.equal(x, expected[name])


@pytest.mark.parametrize("size", ["one", "two"])
def test_a_background_write_has_the_state_at_its_start(runs: SimpleNamespace, size: str) -> None:
    """Training meanwhile changes weights and moments in place, but not the copy."""
    assert all(answer["problems"] == "" for answer in getattr(runs, size))
    foreground, background = (
        read_all(runs.root / size / name / "shards") for name in ("global_step_3", "in_background")
    )
    assert foreground.keys() == background.keys()
    assert any(key.endswith("exp_avg_sq") for key in background)
    assert all(torch.equal(foreground[key], x) for key, x in background.items())
    states = [
        torch.load(runs.root / size / name / "ranks/rank_0.pt", weights_only=False)
        for name in ("global_step_3", "in_background")
    ]
    assert states[0]["schedules"] == states[1]["schedules"]


def test_each_rank_writes_its_own_half(runs: SimpleNamespace) -> None:
    """Neither a rank's file nor its copy is larger than its shard, except for padding."""
    whole = runs.one[0]["num_bytes"]
    assert sum(answer["num_bytes"] for answer in runs.two) == pytest.approx(whole, rel=0.02)
    for name in ("global_step_3", "in_background"):
        for rank in (0, 1):
            written = (runs.root / "two" / name / f"shards/__{rank}_0.distcp").stat().st_size
            assert written == pytest.approx(whole / 2, rel=0.25)  # with headers of small tensors


def test_every_rank_reports_a_failed_write(runs: SimpleNamespace) -> None:
    """No rank waits for one that failed, neither in the foreground nor in the background."""
    for answer in runs.two:
        assert len(answer["refused"]) == 2
        assert all("NotADirectoryError" in problem for problem in answer["refused"])


def read_all(shards: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a distributed checkpoint."""
    metadata = dcp.FileSystemReader(shards).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=shards, no_dist=True)
    return tensors
