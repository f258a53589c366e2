"""Blocks that are compiled, or have Liger's kernels: the same gradient, or a refusal."""

import pytest
import torch
from torch import Tensor

from tests.verl.training.ranks import make_groups
from tests.verl.training.test_models import ARCHITECTURES, GROUPS, answers, build
from verl.config import Config
from verl.packing import SHARED_PROMPT, common_prompts
from verl.training import kernels
from verl.training.models import LogProbModel


@pytest.mark.slow  # some ten seconds of compiling
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_compiled_blocks_have_the_same_gradient(name: str) -> None:
    """Of each weight, for other numbers of tokens too, recomputed or not; and that took a time."""
    assert name in ARCHITECTURES
    plain, compiled = (build(name, torch.float32) for _ in range(2))
    kernels.use_kernels(compiled, "compile")
    before = kernels.compile_seconds()
    for groups in (GROUPS, GROUPS[:2], [(30, [20, 11])]):
        batch = make_groups(groups)
        for shares in (False, True):
            if shares:
                batch.rows[SHARED_PROMPT] = common_prompts(batch)
            wanted = answers(LogProbModel(plain), batch, 0.7, True)
            found = answers(LogProbModel(compiled), batch, 0.7, True)
            assert all(distance(*pair) < 1e-5 for pair in zip(found, wanted, strict=True))
    assert kernels.compile_seconds() > before
    compiled.gradient_checkpointing_enable({"use_reentrant": False})
    found = answers(LogProbModel(compiled), batch, 0.7, True)
    assert all(distance(*pair) < 1e-5 for pair in zip(found, wanted, strict=True))
    assert len(torch._dynamo.utils.counters["graph_break"]) > 0, "attention is left out"
    assert not torch._dynamo.utils.counters["recompile_limit"]


def distance(found: Tensor, wanted: Tensor) -> float:
    """Of the norm."""
    return float(((found - wanted).norm() / wanted.norm()).detach())


@pytest.mark.parametrize(
    ("device", "installed", "said"),
    [("cpu", "0.6", "on a CPU"), ("cuda", "", "pip install liger-kernel"), ("cuda", "0.6", None)],
)
def test_liger_is_refused_where_it_cannot_compute(
    device: str, installed: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, of the policy or of the critic, before anything is loaded."""
    monkeypatch.setattr(kernels, "version_of", lambda _: installed)
    for section in ("policy", "critic"):
        config = Config()
        config.trainer.device = device
        assert not list(kernels.kernel_problems(config))
        model = config.critic.model if section == "critic" else config.actor_rollout_ref.model
        model.kernels = "liger"
        found = [str(problem) for problem in kernels.kernel_problems(config)]
        assert len(found) == (said is not None)
        assert all(said in line and "\n" not in line for line in found)
