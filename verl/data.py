"""Rows become prompts of token ids, and prompts come in batches: rendering and sampling.

Files and their format are read in `verl.rows`. No search and no Ray here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, overload

import numpy as np

from verl.config import Config
from verl.errors import ConfigError, DataError, explain
from verl.protocol import Prompt
from verl.rows import Row, load_rows

__all__ = ["PromptDataset", "PromptSampler", "choose", "load_prompts", "load_rows", "render"]

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What rendering needs of a Hugging Face tokenizer."""

    @property
    def chat_template(self) -> Any: ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def choose(rows: Sequence[Row], num_rows: int | None, seed: int) -> list[Row]:
    """`num_rows` rows chosen by seed, in file order; all of them for None or a larger number."""
    if num_rows is None or num_rows >= len(rows):
        return list(rows)
    chosen = np.random.default_rng(seed).permutation(len(rows))[:num_rows]
    return [rows[i] for i in sorted(chosen.tolist())]


def render(row: Row, tokenizer: Tokenizer) -> Prompt:
    """The row as token ids to generate from.

    Messages go through the tokenizer's chat template, with the header of the assistant's turn;
    a tokenizer without template gets their contents joined by newlines, and a plain string is
    taken as it is. Templates write their own special tokens; plain text gets the tokenizer's.
    """
    templated = not isinstance(row.prompt, str) and bool(tokenizer.chat_template)
    if isinstance(row.prompt, str):
        text = row.prompt
    elif templated:
        messages = [dict(message) for message in row.prompt]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = "\n".join(message["content"] for message in row.prompt)
    ids = tokenizer.encode(text, add_special_tokens=not templated)
    return Prompt(row.uid, tuple(ids), row.data_source, row.ground_truth, row.extra_info)


class PromptDataset(Sequence[Prompt]):
    """Prompts that fit the budget, in file order."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._prompts = list(prompts)

    @classmethod
    def load(
        cls,
        files: str | Sequence[str],
        tokenizer: Tokenizer,
        *,
        max_start_length: int,
        num_rows: int | None = None,
        seed: int = 0,
        prompt_key: str = "prompt",
        filter_overlong: bool = True,
    ) -> PromptDataset:
        """Read, choose, render, and leave out (or refuse) prompts over `max_start_length` tokens.

        Raises DataError for malformed rows, for over-long ones if they are not to be filtered,
        and when none is left.
        """
        rows = choose(load_rows(files, prompt_key), num_rows, seed)
        prompts = [render(row, tokenizer) for row in rows]
        kept = [prompt for prompt in prompts if len(prompt.ids) <= max_start_length]
        if len(kept) < len(prompts):
            _report_overlong(prompts, max_start_length, filter_overlong and bool(kept))
        return cls(kept)

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        return self._prompts[index]

    def batches(self, batch_size: int) -> Iterator[list[Prompt]]:
        """Every prompt once, in order; the last batch may be smaller (for validation)."""
        for start in range(0, len(self), batch_size):
            yield self._prompts[start : start + batch_size]


def load_prompts(
    config: Config, files: str | Sequence[str], num_rows: int | None, tokenizer: Tokenizer
) -> PromptDataset:
    """The training or validation prompts of a run, as its `data` options say."""
    data = config.data
    return PromptDataset.load(
        files,
        tokenizer,
        max_start_length=data.max_start_length,
        num_rows=num_rows,
        seed=config.trainer.seed,
        prompt_key=data.prompt_key,
        filter_overlong=data.filter_overlong_prompts,
    )


def _report_overlong(prompts: Sequence[Prompt], limit: int, may_drop: bool) -> None:
    """Log the count of over-long prompts, or refuse them with their rows."""
    overlong = [prompt for prompt in prompts if len(prompt.ids) > limit]
    longest = max(len(prompt.ids) for prompt in overlong)
    count = f"{len(overlong)} of {len(prompts)} prompts over {limit} tokens (longest {longest})"
    if may_drop:
        logger.warning("left out %s: data.max_start_length=%d", count, limit)
        return
    first = ", ".join(prompt.uid for prompt in overlong[:5])
    fix = f"raise data.max_start_length to {longest}, or shorten these rows"
    raise DataError(explain("data.max_start_length", f"{count}: {first}", "prompts that fit", fix))


class PromptSampler:
    """Batches of row numbers without end, in an order that depends on seed and epoch only.

    Rows are never dropped: a last, partial batch is completed from the next epoch's permutation.
    So that no batch holds a row twice, rows of that partial batch come later in the next epoch.
    With `shuffle` false every epoch is in file order.
    """

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool = True, seed: int = 0) -> None:
        if batch_size > num_rows:
            expected = f"at most the {num_rows} rows there are"
            fix = f"data.train_batch_size={num_rows}, or give more rows"
            raise ConfigError(explain("data.train_batch_size", batch_size, expected, fix))
        self.num_rows = num_rows
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order(0, [])

    def num_batches(self, num_epochs: int) -> int:
        """Batches until each row was seen `num_epochs` times or more."""
        return -(-self.num_rows * num_epochs // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> list[int]:
        """`batch_size` different row numbers."""
        batch = self._order[self._position : self._position + self.batch_size]
        self._position += len(batch)
        if self._position == self.num_rows:
            self._epoch += 1
            self._position = self.batch_size - len(batch)
            self._order = self._epoch_order(self._epoch, batch if self._position else [])
            batch = batch + self._order[: self._position]
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the next batch starts."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_rows": self.num_rows,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where a sampler of the same rows and batch size stood. Raises ConfigError."""
        for name in ("num_rows", "batch_size"):
            if state[name] != getattr(self, name):
                fix = "resume with the data and data.train_batch_size of the checkpoint"
                got = f"{getattr(self, name)} {name}"
                raise ConfigError(explain("resumed data order", got, str(state[name]), fix))
        self._seek(state["epoch"], state["position"])

    def _seek(self, epoch: int, position: int) -> None:
        """Rebuild the order of `epoch`, which depends on the tails of the epochs before."""
        order: list[int] = []
        for number in range(epoch + 1):
            tail_length = self.num_rows * number % self.batch_size
            tail = order[self.num_rows - tail_length :] if number else []
            order = self._epoch_order(number, tail)
        self._epoch, self._position, self._order = epoch, position, order

    def _epoch_order(self, epoch: int, tail: Sequence[int]) -> list[int]:
        """The epoch's permutation; rows of `tail` are swapped out of the batch they began."""
        if not self._shuffle:
            return list(range(self.num_rows))
        generator = np.random.default_rng([self._seed, epoch])
        order: list[int] = generator.permutation(self.num_rows).tolist()
        held = set(tail)
        head = self.batch_size - len(held) if held else 0
        free = (i for i in range(head, self.num_rows) if order[i] not in held)
        for i in range(head):
            if order[i] in held:
                j = next(free)
                order[i], order[j] = order[j], order[i]
        return order
