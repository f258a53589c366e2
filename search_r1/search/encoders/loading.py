"""Devices, dtypes, lengths and weights of models, each checked before a model is used.

Needs torch and transformers; imported only by the encoder and the reranker.
"""

import hashlib
import socket
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from search_r1.search.errors import SetupError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
HUB_S = 10.0
"""How long a hub may take to be connected with."""
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
              RuntimeError, SafetensorError, StrictDataclassError)  # fmt: skip
"""What loading a damaged or alien model folder raises."""
LARGEST_LENGTH = 1 << 20
"""A tokenizer without a limit reports a number far above this one."""


def torch_dtype(flag: str, name: str) -> torch.dtype:
    """The dtype called `name`; raises SetupError, naming the flag, for an unknown one."""
    if name not in DTYPES:
        raise SetupError(f"--{flag} {name}; expected {', '.join(DTYPES)}")
    return DTYPES[name]


def pick_device(flag: str, name: str | None) -> str:
    """The device called `name`, by default a GPU if there is one; raises SetupError if absent."""
    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SetupError(
            f"--{flag} {name} cannot be used ({error}); expected cpu, or cuda:0 that torch sees"
        ) from error
    return device


@contextmanager
def explain_load_errors(flag: str, model_path: str) -> Iterator[None]:
    """Makes a failure of the body, which loads a model, a SetupError with the fix."""
    if model_path.startswith((".", "/", "~")) and not Path(model_path).is_dir():
        raise SetupError(
            f"model folder {model_path} does not exist; expected a model folder or a hub name "
            f"such as intfloat/e5-base-v2: set --{flag}"
        )
    try:
        # loading would ask an absent hub for each file of the model several times, for minutes
        is_here = Path(model_path).is_dir() or try_to_load_from_cache(model_path, "config.json")
        if not (is_here or constants.HF_HUB_OFFLINE or getproxies()):
            _reach_hub(flag, model_path)
        yield
    except UNREADABLE as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        raise SetupError(
            f"model {model_path!r} cannot be loaded ({reason}); expected a whole folder or a hub "
            f"name: set --{flag} (a model with code of its own needs --trust_remote_code)"
        ) from error


def _reach_hub(flag: str, model_path: str) -> None:
    hub = urlsplit(constants.ENDPOINT)
    try:
        port = hub.port or {"http": 80}.get(hub.scheme, 443)
        socket.create_connection((str(hub.hostname), port), HUB_S).close()
    except OSError as error:
        raise SetupError(
            f"model {model_path!r} is no folder here, and {hub.hostname} does not answer "
            f"({error}); expected a model folder or a hub that can be reached: set --{flag}"
        ) from error


def check_weights(kind: Any, model_path: str, *, spare: str = "", **options: Any) -> None:
    """Raise SetupError if weights of class `kind` are missing, but for those that begin `spare`.

    Libraries would draw them at random. sentence-transformers does not report it, so the model is
    loaded once more, without memory.
    """
    _, report = kind.from_pretrained(
        model_path, output_loading_info=True, device_map="meta", **options
    )
    missing = [key for key in report["missing_keys"] if not (spare and key.startswith(spare))]
    if missing:
        raise SetupError(
            f"model {model_path!r} has no weights for {', '.join(sorted(missing)[:3])} "
            f"({len(missing)} missing); expected a complete checkpoint for {kind.__name__}"
        )


def longest_input(tokenizer: Any, config: Any) -> int:
    """Tokens that the model can read at most, special tokens included."""
    limit = min(int(tokenizer.model_max_length), LARGEST_LENGTH)
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if not positions:
        return limit
    # these count positions from pad_token_id + 1, so that many of the table are never used
    is_offset = config.model_type in {"roberta", "xlm-roberta", "camembert", "mpnet"}
    return min(limit, positions - (config.pad_token_id + 1 if is_offset else 0))


def weights_digest(model: torch.nn.Module) -> str:
    """64-bit hash (hex) of a few values of every weight: another training gives another one."""
    hasher = hashlib.blake2b(digest_size=8)
    for name, weight in model.state_dict().items():
        sample = weight.detach().reshape(-1)[:64].float().cpu().numpy()
        hasher.update(f"{name} {tuple(weight.shape)}".encode() + sample.tobytes())
    return hasher.hexdigest()
