"""Loads tokenizers and models from a folder or the hub, refusing what would run with wrong weights.

Imported only by encoders and the reranker: it needs torch and transformers.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils.hub import cached_file

from search_r1.search.errors import SetupError

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LARGEST_LENGTH = 1 << 20
"""A tokenizer that knows no limit says a number far above this one."""


def find_file(model_path: str, name: str) -> str | None:
    """The local path of a model's file, fetched from the hub if needed; None if it has none."""
    path: str | None = cached_file(model_path, name, _raise_exceptions_for_missing_entries=False)
    return path


def torch_dtype(flag: str, name: str) -> torch.dtype:
    """The dtype called `name`; raises SetupError, naming the flag, for an unknown one."""
    if name not in DTYPES:
        raise SetupError(f"--{flag} {name}; expected {', '.join(DTYPES)}")
    return DTYPES[name]


def pick_device(flag: str, name: str | None) -> torch.device:
    """The device called `name`, by default a GPU if there is one; raises SetupError if absent."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SetupError(
            f"--{flag} {name} cannot be used ({error}); expected cpu, or a GPU that "
            "torch sees such as cuda:0"
        ) from error
    return device


def explained(flag: str, model_path: str, load: Callable[[], Any]) -> Any:
    """What `load` returns; its failure becomes a SetupError with the fix."""
    if model_path.startswith((".", "/", "~")) and not Path(model_path).is_dir():
        raise SetupError(
            f"model folder {model_path} does not exist; expected a model folder or a hub name "
            f"such as intfloat/e5-base-v2: set --{flag}"
        )
    try:
        return load()
    except (OSError, ValueError, KeyError) as error:
        raise SetupError(
            f"model {model_path!r} cannot be loaded ({error}); expected a complete model folder "
            f"or a hub name such as intfloat/e5-base-v2: set --{flag} (a model with code of its "
            "own needs --trust_remote_code)"
        ) from error


def load_tokenizer(model_path: str, subfolder: str, trust_remote_code: bool) -> Any:
    """The model's tokenizer, the fast one if it has one."""
    return AutoTokenizer.from_pretrained(
        model_path, subfolder=subfolder, trust_remote_code=trust_remote_code
    )


def load_model(kind: Any, model_path: str, *, spare: str = "", **options: Any) -> torch.nn.Module:
    """A model of class `kind` for inference; raises SetupError if weights that it uses are missing.

    Weights whose names start with `spare` are not used and may be missing.
    """
    model, loading = kind.from_pretrained(model_path, output_loading_info=True, **options)
    missing = [key for key in loading["missing_keys"] if not (spare and key.startswith(spare))]
    if missing:
        raise SetupError(
            f"model {model_path!r} has no weights for {', '.join(sorted(missing)[:3])} "
            f"({len(missing)} missing); expected a complete checkpoint for {type(model).__name__}"
        )
    loaded: torch.nn.Module = model.eval().requires_grad_(False)
    return loaded


def longest_input(tokenizer: Any, config: Any) -> int:
    """Tokens that the model can read at most, special tokens included."""
    limit = min(int(tokenizer.model_max_length), LARGEST_LENGTH)
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if not positions:
        return limit
    is_offset = config.model_type in {"roberta", "xlm-roberta", "camembert", "mpnet"}
    return min(limit, positions - (config.pad_token_id + 1 if is_offset else 0))


def weights_digest(model: torch.nn.Module) -> str:
    """64-bit hash (hex) of a few values of every weight: another training gives another one."""
    hasher = hashlib.blake2b(digest_size=8)
    for name, weight in model.state_dict().items():
        sample = weight.detach().reshape(-1)[:64].float().cpu().numpy()
        hasher.update(f"{name} {tuple(weight.shape)}".encode() + sample.tobytes())
    return hasher.hexdigest()
