"""Secrets to plant in the environment and then look for in what a run wrote."""

from __future__ import annotations

from pathlib import Path

import psutil

VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "RETRIEVER_TOKEN",
             "OPENAI_API_KEY", "SERPAPI_API_KEY", "AGENT_TOKEN")  # fmt: skip
PLANTED = {name: f"plantedsecret{number}" for number, name in enumerate(VARIABLES)}
PASSWORD = "plantedpassword"
URL = f"http://ann:{PASSWORD}@127.0.0.1:9/v1"
SECRETS = (*PLANTED.values(), PASSWORD)


def leaks(*folders: Path) -> list[str]:
    """Return the files whose name or content has a secret."""
    found = []
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes() + str(path).encode()
        found += [f"{path}: {secret}" for secret in SECRETS if secret.encode() in content]
    return found


def shown() -> list[str]:
    """Return the command lines of running processes that have a secret."""
    lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(secret in line for secret in SECRETS)]
