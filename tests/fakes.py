"""Stand-ins for tests: a byte tokenizer, and engines that return given texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from search_r1.retrieval.errors import RetrieverUnavailable
from search_r1.retrieval.schema import Document
from verl.rollout.interface import RolloutEngine
from verl.types import Completion, Sampling, Segment, Trajectory

EOS = 256
PAD = 257


class ByteTokenizer:
    """One id per UTF-8 byte, then those of end of sequence and padding; decoding is exact."""

    all_special_tokens = ("<eos>", "<pad>")
    eos_token_id = EOS
    pad_token_id = PAD
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode a text; special tokens written in it become special ids, as in real tokenizers."""
        marked = text.encode()
        ids: list[int] = []
        while marked:
            special = next((n for n, t in self._special() if marked.startswith(t)), None)
            taken = len(dict(self._special())[special]) if special is not None else 1
            ids.append(marked[0] if special is None else special)
            marked = marked[taken:]
        return ids + ([EOS] if add_special_tokens else [])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        special = dict(self._special())
        kept = (i for i in ids if i < EOS or not skip_special_tokens)
        return b"".join(special[i] if i >= EOS else bytes([i]) for i in kept).decode()

    def _special(self) -> list[tuple[int, bytes]]:
        return [(EOS, b"<eos>"), (PAD, b"<pad>")]


@dataclass(frozen=True)
class Request:
    """The arguments of one `generate` call."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling


@dataclass
class ScriptedEngine(RolloutEngine):
    """Returns the script's texts, one per request, cut at the first stop string.

    An entry may be ids instead of a text, which are then returned unchanged. Requests are recorded.
    """

    script: Sequence[str | Sequence[int]]
    weight_version: int = 0
    requests: list[Request] = field(default_factory=list)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)

    takes_weights = True

    async def update_weights(self, folder: str, version: int) -> None:
        self.weight_version = version

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        entry = self.script[len(self.requests)]
        self.requests.append(Request(tuple(prompt_ids), sampling))
        if isinstance(entry, str):
            text, reason = cut_at_stop(entry, sampling.stop)
            ids = self.tokenizer.encode(text)
            if len(ids) > sampling.max_tokens:
                ids, reason = ids[: sampling.max_tokens], "length"
                text = self.tokenizer.decode(ids)
        else:
            ids, reason = list(entry), "stop"
            text = self.tokenizer.decode(ids)
        log_probs = tuple(-0.5 - 0.001 * n for n in range(len(ids)))
        return Completion(tuple(ids), log_probs, text, reason, self.weight_version)


class UnavailableRetriever:
    """A retriever whose every search fails."""

    async def search(self, query: str) -> list[Document]:
        raise RetrieverUnavailable(f"no answer to {query}")


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Return `text` up to the end of the stop string that ends first, and the finish reason."""
    ends = [text.index(tag) + len(tag) for tag in stop if tag in text]
    return (text[: min(ends)], "stop") if ends else (text, "stop")


def texts(trajectory: Trajectory, origin: int) -> list[str]:
    """Return the texts of a trajectory's segments of one origin."""
    return [segment.text for segment in trajectory.segments if segment.origin == origin]


def ids_of(segments: Sequence[Segment]) -> list[int]:
    """Return all ids of `segments`, in order."""
    return [i for segment in segments for i in segment.ids]
