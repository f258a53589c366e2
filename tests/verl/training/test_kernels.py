"""Compiled blocks have the same gradient; Liger's kernels are refused where they cannot run."""

import pytest
import torch
from torch import Tensor

from tests.verl.training.ranks import make_groups
from tests.verl.training.test_models import ARCHITECTURES, GROUPS, build, outputs_and_gradient
from verl.config import Config
from verl.packing import SHARED_PROMPT, common_prompts
from verl.training import kernels
from verl.training.models import LogProbModel


@pytest.mark.slow  # some ten seconds of compiling
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_compiled_blocks_have_the_same_gradient(name: str) -> None:
    """For each weight, for various numbers of tokens, with recomputation and without."""
    assert name in ARCHITECTURES
    plain, compiled = (build(name, torch.float32) for _ in range(2))
    kernels.use_kernels(compiled, "compile")
    before = kernels.compile_seconds()
    for groups in (GROUPS, GROUPS[:2], [(30, [20, 11])]):
        batch = make_groups(groups)
        for shares in (False, True):
            if shares:
                batch.rows[SHARED_PROMPT] = common_prompts(batch)
            expected = outputs_and_gradient(LogProbModel(plain), batch, 0.7, True)
            actual = outputs_and_gradient(LogProbModel(compiled), batch, 0.7, True)
            assert all(distance(*pair) < 1e-5 for pair in zip(actual, expected, strict=True))
    assert kernels.compile_seconds() > before
    compiled.gradient_checkpointing_enable({"use_reentrant": False})
    actual = outputs_and_gradient(LogProbModel(compiled), batch, 0.7, True)
    assert all(distance(*pair) < 1e-5 for pair in zip(actual, expected, strict=True))
    assert len(torch._dynamo.utils.counters["graph_break"]) > 0, "attention is not compiled"
    assert not torch._dynamo.utils.counters["recompile_limit"]


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of `expected`."""
    return float(((actual - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize(
    ("device", "installed", "message"),
    [("cpu", "0.6", "on a CPU"), ("cuda", "", "pip install liger-kernel"), ("cuda", "0.6", None)],
)
def test_liger_is_refused_where_it_cannot_run(
    device: str, installed: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policy and critic get a one-line error before anything is loaded."""
    monkeypatch.setattr(kernels, "version_of", lambda _: installed)
    for section in ("policy", "critic"):
        config = Config()
        config.trainer.device = device
        assert not list(kernels.kernel_problems(config))
        model = config.critic.model if section == "critic" else config.actor_rollout_ref.model
        model.kernels = "liger"
        errors = [str(problem) for problem in kernels.kernel_problems(config)]
        assert len(errors) == (message is not None)
        assert all(message in line and "\n" not in line for line in errors)
