"""Checks of devices, dtypes, input lengths and weights before a model is used.

Imports torch and transformers; only the encoder and the reranker import this module.
"""

import hashlib
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from search_r1.retrieval.encoders.families import input_limit
from search_r1.retrieval.encoders.model_name import check_model_name
from search_r1.retrieval.errors import SetupError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
              RuntimeError, SafetensorError, StrictDataclassError)  # fmt: skip
"""Errors raised when loading a damaged or unsupported model folder."""


def torch_dtype(flag: str, name: str) -> torch.dtype:
    """Return the dtype `name`; raises SetupError, which names the flag, for an unknown dtype."""
    if name not in DTYPES:
        raise SetupError(f"--{flag} {name}; expected {', '.join(DTYPES)}")
    return DTYPES[name]


def pick_device(flag: str, name: str | None) -> str:
    """Return device `name`, by default a GPU if there is one; raises SetupError if unusable."""
    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SetupError(
            f"--{flag} {device} cannot be used ({error}); expected cpu or a visible GPU: cuda:0"
        ) from error
    return device


@contextmanager
def explain_load_errors(flag: str, model_path: str) -> Iterator[None]:
    """Turn errors of the `with` block, which loads a model, into a SetupError with the fix."""
    check_model_name(flag, model_path)
    try:
        yield
    except UNREADABLE as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        raise SetupError(
            f"model {model_path!r} cannot be loaded ({reason}); expected a complete folder or a "
            f"hub name: set --{flag} (a model that comes with code needs --trust_remote_code)"
        ) from error


def check_weights(
    model_class: Any, model_path: str, *, optional_prefix: str = "", **options: Any
) -> None:
    """Raise SetupError for missing weights, except those that begin with `optional_prefix`, if any.

    Libraries initialise missing weights at random, which sentence-transformers does not report. So
    the model is loaded once more, on the meta device without memory.
    """
    _, report = model_class.from_pretrained(
        model_path, output_loading_info=True, device_map="meta", **options
    )
    missing = set(report["missing_keys"])
    if optional_prefix:
        missing = {key for key in missing if not key.startswith(optional_prefix)}
    if missing:
        raise SetupError(
            f"model {model_path!r} has no weights for {', '.join(sorted(missing)[:3])} "
            f"({len(missing)} missing); expected a complete checkpoint for {model_class.__name__}"
        )


def longest_input(tokenizer: Any, config: Any) -> int:
    """Return the maximum number of input tokens of the model, special tokens included."""
    positions = getattr(config, "max_position_embeddings", None)
    padding = getattr(config, "pad_token_id", None)
    return input_limit(int(tokenizer.model_max_length), positions, config.model_type, padding)


def weights_digest(model: torch.nn.Module) -> str:
    """Return a 64-bit hash (hex) of the first values of every weight, to tell trainings apart."""
    hasher = hashlib.blake2b(digest_size=8)
    for name, weight in model.state_dict().items():
        sample = weight.detach().reshape(-1)[:64].float().cpu().numpy()
        hasher.update(f"{name} {tuple(weight.shape)}".encode() + sample.tobytes())
    return hasher.hexdigest()
