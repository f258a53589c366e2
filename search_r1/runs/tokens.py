"""The text of each token id of a run, from the run's own `tokenizer.json`.

No code of a model is executed. A tokenizer is used only if its fingerprint matches the one that
was recorded with the trajectories.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from verl.data.trajectories import HEADER, fingerprint, read_header
from verl.errors import first_line

TOKENIZER_FILE = "tokenizer.json"
REPLACEMENT = "\ufffd"
"""Decoders return this for bytes that are only a part of a character."""
MAX_TOKENS_PER_CHARACTER = 8
"""After this many tokens without a complete character, the replacement character is shown."""


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return one text per token; a character of several tokens belongs to the last of them."""

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))

    texts: list[str] = []
    before: list[int] = []
    pending: list[int] = []  # tokens of an incomplete character
    for token_id in ids:
        pending.append(token_id)
        # Decode after the previous token, since some decoders drop a space at the start.
        text = decode([*before, *pending])[len(decode(before)) :]
        if text.endswith(REPLACEMENT) and len(pending) < MAX_TOKENS_PER_CHARACTER:
            texts.append("")
        else:
            texts.append(text)
            before, pending = [token_id], []
    if pending:
        texts[-1] = decode(pending)
    return texts


def find_tokenizer(
    run: Path, rollouts: Path | None, config: Mapping[str, Any]
) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer of a run's trajectories, or None and the reason."""
    if rollouts is None:
        return None, "the run does not record training trajectories"
    recorded = read_header(rollouts) if (rollouts / HEADER).is_file() else None
    problems = []
    for path in _candidates(run, config):
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception for all errors
            problems.append(f"{path} cannot be read ({first_line(error)})")
            continue
        if recorded is None or fingerprint(tokenizer) == recorded:
            return tokenizer, ""
        problems.append(f"{path} is not the tokenizer of these trajectories")
    missing = f"no {TOKENIZER_FILE} of the run's model is on this machine"
    return None, f"{(problems or [missing])[0]}: tokens are shown as ids"


def _candidates(run: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    """Yield tokenizer files: of the newest checkpoint, then of the model's folder or hub cache."""
    checkpoints = run.glob(f"global_step_*/huggingface/{TOKENIZER_FILE}")
    yield from sorted(checkpoints, key=lambda path: path.stat().st_mtime, reverse=True)[:1]
    model = ((config.get("actor_rollout_ref") or {}).get("model") or {}).get("path")
    if not model:
        return
    if (Path(model) / TOKENIZER_FILE).is_file():
        yield Path(model) / TOKENIZER_FILE
    elif str(model).count("/") == 1 and not str(model).startswith((".", "/")):
        cached = try_to_load_from_cache(str(model), TOKENIZER_FILE)
        if isinstance(cached, str):
            yield Path(cached)
