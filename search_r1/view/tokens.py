"""What each token id of a run is, as text; by the run's own `tokenizer.json`, nothing else.

No code of a model is run. The tokenizer is taken only where its fingerprint is that of the dump.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from verl.data.trajectories import HEADER, fingerprint, read_header
from verl.errors import first_line

FILE = "tokenizer.json"
BROKEN = "\ufffd"
"""What a decoder gives for bytes that are only a part of a character."""
MOST_BYTES = 8
"""Tokens that one character may take before it is shown broken."""


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One text a token; of a character of several tokens, the last has it, the others none."""

    def decode(some: list[int]) -> str:
        return str(tokenizer.decode(some, skip_special_tokens=False))

    found, before, open_ids = list[str](), list[int](), list[int]()
    for one in ids:
        open_ids.append(one)
        # What comes before counts: some decoders drop a space at the start.
        text = decode([*before, *open_ids])[len(decode(before)) :]
        if text.endswith(BROKEN) and len(open_ids) < MOST_BYTES:
            found.append("")
        else:
            found.append(text)
            before, open_ids = [one], []
    if open_ids and found:
        found[-1] = decode(open_ids)
    return found


def find_tokenizer(
    run: Path, rollouts: Path | None, config: Mapping[str, Any]
) -> tuple[Tokenizer | None, str]:
    """The tokenizer of a run's dump, or None and why there is none."""
    if rollouts is None:
        return None, "the run keeps no training trajectories"
    wanted = read_header(rollouts) if (rollouts / HEADER).is_file() else None
    seen = []
    for path in _candidates(run, config):
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - tokenizers raises it bare, as for a newer format
            seen.append(f"{path} cannot be read ({first_line(error)})")
            continue
        if wanted is None or fingerprint(tokenizer) == wanted:
            return tokenizer, ""
        seen.append(f"{path} is not the tokenizer of this dump")
    problem = seen[0] if seen else f"no {FILE} of the run's model is on this machine"
    return None, f"{problem}: tokens are shown by their ids"


def _candidates(run: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    """Where the tokenizer may be: the newest checkpoint, the model's folder, the hub's cache."""
    checkpoints = run.glob(f"global_step_*/huggingface/{FILE}")
    yield from sorted(checkpoints, key=lambda path: path.stat().st_mtime, reverse=True)[:1]
    model = ((config.get("actor_rollout_ref") or {}).get("model") or {}).get("path")
    if not model:
        return
    if (Path(model) / FILE).is_file():
        yield Path(model) / FILE
    elif str(model).count("/") == 1 and not str(model).startswith((".", "/")):
        cached = try_to_load_from_cache(str(model), FILE)
        if isinstance(cached, str):
            yield Path(cached)
