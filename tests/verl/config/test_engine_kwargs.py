"""Arguments for vLLM: how they are given, and which are refused."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from tests.verl.config.test_cli import ROLLOUT, compose
from tests.verl.config.test_presets import preset
from verl.config import cli, engine_kwargs
from verl.config.engine_kwargs import KEY, OWN_OPTIONS, is_approximate, vllm_arguments
from verl.errors import ConfigError
from verl.nvidia import vllm_device


def given(*arguments: str) -> dict[str, object]:
    return compose(*arguments).actor_rollout_ref.rollout.engine_kwargs


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_each_entry_and_the_whole_mapping_can_be_given(plus: str) -> None:
    """Entries may be nested, stand below veRL's name of the engine, or have the name of before."""
    assert given(f"{plus}{KEY}.enforce_eager=true") == {"enforce_eager": True}
    assert given(f"{plus}{KEY}.vllm.enforce_eager=true") == {"enforce_eager": True}
    assert given(f"{plus}{ROLLOUT}.enforce_eager=true") == {"enforce_eager": True}
    assert given(f"{plus}{KEY}={{enforce_eager: true}}") == {"enforce_eager": True}
    nested = (f"{plus}{KEY}.speculative_config.method=ngram", f"{KEY}.block_size=16")
    assert given(*nested) == {"speculative_config": {"method": "ngram"}, "block_size": 16}


def test_a_preset_gives_them_as_yaml(tmp_path: Path) -> None:
    """As ours, and as veRL has them: below the engine's name, beside those of another engine."""
    ours = {"speculative_config": {"method": "ngram"}}
    for written in (ours, {"vllm": {**ours, "swap_space": None}, "sglang": {"x": None}}):
        text = yaml.safe_dump({"actor_rollout_ref": {"rollout": {"engine_kwargs": written}}})
        line = preset(tmp_path, text, "data.train_files=a", "data.val_files=b",
                      "actor_rollout_ref.model.path=m")  # fmt: skip
        read = cli.compose(line).actor_rollout_ref.rollout.engine_kwargs
        assert engine_kwargs.given(read) == ours


@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_what_the_run_decides_is_refused_with_its_option(name: str) -> None:
    """Every such argument exists in vLLM; null leaves it to the run."""
    with pytest.raises(ConfigError, match=rf"{KEY}\.{name}: got 1,") as caught:
        given(f"{KEY}.{name}=1")
    assert OWN_OPTIONS[name] in str(caught.value)
    assert given(f"{KEY}.{name}=null") == {name: None}
    assert not vllm_device() or name in vllm_arguments()


@pytest.mark.skipif(not vllm_device(), reason="needs vLLM")
def test_an_argument_that_vllm_does_not_have_is_refused_with_the_nearest() -> None:
    """Its names are read from its source; without vLLM they are checked where the engine starts."""
    with pytest.raises(ConfigError, match=rf"{KEY}\.enforce_eagr: .* did you mean enforce_eager"):
        given(f"{KEY}.enforce_eagr=true")


@pytest.mark.vllm_cpu
def test_the_names_are_those_of_vllm() -> None:
    """As the dataclass itself has them."""
    from vllm import AsyncEngineArgs  # noqa: PLC0415

    assert vllm_arguments() == {field.name for field in dataclasses.fields(AsyncEngineArgs)}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [({}, False), ({"enforce_eager": True}, False), ({"kv_cache_dtype": "auto"}, False),
     ({"kv_cache_dtype": None}, False), ({"kv_cache_dtype": "bfloat16"}, False),
     ({"kv_cache_dtype": "fp8_e5m2"}, True), ({"quantization": "fp8_per_tensor"}, True)],
)  # fmt: skip
def test_fewer_bits_make_an_engine_approximate(
    arguments: dict[str, object], expected: bool
) -> None:
    """Of weights or of the cache; a cache in a format of torch is as exact as the engine."""
    assert is_approximate(arguments) is expected
