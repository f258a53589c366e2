"""Checks what a flag names as a model, from its name alone, before torch is imported."""

from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from search_r1.retrieval.errors import SetupError
from verl.hub_access import hub_problem

HASH = "hash"
"""The encoder that needs no model."""


def check_model_name(flag: str, model_path: str) -> None:
    """Raise SetupError for a missing folder, or for a hub name if the hub does not answer.

    Without a connection, loading would retry each file of the model for minutes.
    """
    path = Path(model_path)
    is_file = path.suffix == ".onnx" and path.is_file()
    if path.is_dir() or is_file or model_path.partition(":")[0] == HASH:
        return
    if model_path.startswith((".", "/", "~")):
        raise SetupError(
            f"model folder {model_path} does not exist; expected a model folder or a hub name "
            f"such as intfloat/e5-base-v2: set --{flag}"
        )
    if not try_to_load_from_cache(model_path, "config.json") and (problem := hub_problem()):
        raise SetupError(
            f"model {model_path!r} is not a local folder, and {problem}; expected a model folder "
            f"or a reachable hub: set --{flag}"
        )
