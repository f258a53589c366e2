"""Values that are no finite numbers never reach a rank, an engine or an export."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, LlamaConfig, MambaConfig, PretrainedConfig

from verl.errors import ModelError
from verl.model_files import is_finite, num_positions, refuse_values
from verl.rollout.weight_loading import WeightLoading


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_value_is_enough(bad: float, dtype: torch.dtype) -> None:
    """At any place, in any dtype that weights have."""
    for place in (0, 41, 99):
        values = torch.randn(100, dtype=dtype).clamp(-3, 3)
        assert is_finite(values)
        values[place] = bad
        assert not is_finite(values.view(10, 10))


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(0),
        torch.ones(3, dtype=torch.int8),
        torch.ones(3, dtype=torch.bool),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.tensor([torch.finfo(torch.float16).max, torch.finfo(torch.float16).min]).half(),
    ],
)
def test_what_cannot_be_or_is_not_at_fault_passes(values: Tensor) -> None:
    """Nothing, whole numbers, packed ones, and the largest that a dtype has."""
    assert is_finite(values)


def test_tensors_are_named_with_their_number() -> None:
    """The first few in order, in one line."""
    bad, good = torch.tensor([torch.nan]), torch.ones(2)
    named = [*((f"w{i}", bad) for i in range(5, 0, -1)), ("fine", good)]
    with pytest.raises(ModelError) as caught:
        refuse_values(named, "weights of x")
    assert str(caught.value).startswith(
        "weights of x: got NaN or infinite values in w1, w2, w3 (5 in all)"
    )


def test_an_engine_s_worker_names_the_weights_that_are_no_numbers() -> None:
    """Of the model that it has loaded."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    worker = WeightLoading()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    assert worker.faulty_weights() == []
    with torch.no_grad():
        model[1].weight[0, 1] = torch.inf
    assert worker.faulty_weights() == ["1.weight"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(max_position_embeddings=4096), 4096),
        (LlamaConfig(max_position_embeddings=4096,
                     rope_scaling={"rope_type": "linear", "factor": 4.0}), 16384),
        (LlamaConfig(max_position_embeddings=32768, rope_scaling={
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}), 131072),
        (GPT2Config(n_positions=1024), 1024),
        (MambaConfig(), None),
    ],
)  # fmt: skip
def test_positions_are_those_of_the_config(config: PretrainedConfig, expected: int | None) -> None:
    """Stretched ones count, and a model without positions has no bound."""
    assert num_positions(config) == expected
