"""Rendering of rows to prompts of token ids, token budgets, and subsets.

Files and their row format are read in `verl.data.rows`.
"""

import itertools
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jinja2
import numpy as np

from verl.agent.dialogue import CHARS_PER_TOKEN
from verl.config import Config
from verl.data.columns import ALL_ROWS, Columns
from verl.data.outside import neutral_rows
from verl.data.records import MAX_QUOTE, short_repr
from verl.data.rows import Message, Row, load_rows
from verl.data.values import can_be_given
from verl.errors import DataError, explain, shortened
from verl.types import Prompt

logger = logging.getLogger(__name__)

Schema = Mapping[str, Any]
"""JSON schema of a tool in OpenAI's function format, as chat templates expect it."""
TEMPLATE_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""What a chat template raises for messages that it does not expect, itself or in its filters."""
END_CHARS = 1000
"""Characters at the end of a text that are encoded to see whether it ends with an EOS."""
REWRITTEN_ROLES = frozenset({"assistant", "tool", "ipython", "function"})
"""Roles whose messages templates shorten or write as JSON; those of others are written as they are,
without outer white space or switches such as `/no_think`."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts and demonstrations use."""

    @property
    def chat_template(self) -> Any: ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """Render a conversation as text. Called with `tools=…` as well for native tool calls."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int]) -> str: ...
    def get_vocab(self) -> dict[str, int]: ...


def choose(rows: Sequence[Row], num_rows: int | None) -> list[Row]:
    """Choose `num_rows` rows at random, in file order; all rows for None or a larger number.

    They are the same whatever a run's seed is: runs of several seeds are compared on one set.
    """
    if num_rows is None or num_rows >= len(rows):
        return list(rows)
    chosen = np.random.default_rng(0).permutation(len(rows))[:num_rows]
    return [rows[i] for i in sorted(chosen.tolist())]


def render(
    row: Row, tokenizer: Tokenizer, tools: Sequence[Schema] = (), limit: int = sys.maxsize
) -> Prompt:
    """Render a row to the token ids from which the policy generates.

    Messages are rendered by the tokenizer's chat template, with `tools` and the header of the
    assistant's turn; without a template their contents are joined by newlines. A plain string is
    used unchanged. Chat templates write special tokens themselves; for other texts the tokenizer
    adds them, except for a BOS that the text already has, as one that was rendered before, and
    for an EOS, after which there is nothing to generate.
    Only the beginning of a text far over `limit` tokens is encoded (`encode_within`).
    Raises DataError if the chat template rejects the messages or leaves one out.
    """
    is_templated = not isinstance(row.prompt, str) and bool(tokenizer.chat_template)
    if isinstance(row.prompt, str):
        text = _without_space_before_bos(tokenizer, row.prompt)
    elif is_templated:
        text = _render_messages(row.uid, row.prompt, tokenizer, tools)
    else:
        text = "\n".join(message["content"] for message in row.prompt)
    ids = encode_within(tokenizer, text, limit, add_special_tokens=not is_templated)
    ids = _with_one_bos(tokenizer, ids)
    if not is_templated:
        ids = _without_added_eos(tokenizer, ids, text)
    return Prompt(
        row.uid, tuple(ids), row.data_source, row.ground_truth, row.extra_info, text, row.row_truth
    )


def _render_messages(
    uid: str, given: Sequence[Message], tokenizer: Tokenizer, tools: Sequence[Schema]
) -> str:
    """Return the messages of a row as the chat template writes them. Raises DataError."""
    # Parquet gives a message the keys of all others, as null; templates ask whether it has them.
    messages = [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in given
    ]
    text = _apply_template(uid, messages, tokenizer, tools)
    for number, message in enumerate(messages):
        content = message["content"]
        if not content or message["role"] in REWRITTEN_ROLES or content.strip() in text:
            continue
        # Not word for word: if other words give the same text, these have no effect.
        other = [*messages[:number], {**message, "content": "?"}, *messages[number + 1 :]]
        if _apply_template(uid, other, tokenizer, tools) == text:
            role = message["role"]
            got = f"a message of the role {role} that it leaves out: {short_repr(content)}"
            fix = "put its text into the user's message, or give the model another chat template"
            expected = "a chat template that writes every message"
            raise DataError(explain(uid, got, expected, fix))
    return text


def _apply_template(
    uid: str, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, tools: Sequence[Schema]
) -> str:
    """Return what the chat template makes of messages. Raises DataError if it rejects them."""
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    if tools:
        options["tools"] = list(tools)
    try:
        return str(tokenizer.apply_chat_template(messages, **options))
    except TEMPLATE_ERRORS as error:
        is_its_own = isinstance(error, jinja2.TemplateError)
        reason = str(error) if is_its_own else f"{type(error).__name__}: {error}"
        roles = short_repr([message["role"] for message in messages])
        got = " ".join(f"{roles} ({shortened(reason, MAX_QUOTE)})".split())
        fix = "correct the row, or the model's chat template"
        expected = "messages that the chat template accepts"
        raise DataError(explain(uid, got, expected, fix)) from error


def _without_space_before_bos(tokenizer: Tokenizer, text: str) -> str:
    """Return a text that begins with a BOS and white space, in any order, with the BOS first."""
    bos = getattr(tokenizer, "bos_token", None)
    begin = re.match(rf"(?:[\s\ufeff\u200b]*{re.escape(bos)})+", text) if bos else None
    return text if begin is None else f"{bos}{text[begin.end() :]}"


def _with_one_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return the ids with one BOS at the start where there are several."""
    bos = getattr(tokenizer, "bos_token_id", None)
    num = next((n for n, id in enumerate(ids) if id != bos), len(ids))
    return ids[max(num - 1, 0) :] if bos is not None else ids


def _without_added_eos(tokenizer: Tokenizer, ids: list[int], text: str) -> list[int]:
    """Return the ids without an EOS at their end that the text does not have."""
    eos = getattr(tokenizer, "eos_token_id", None)
    if len(ids) < 2 or ids[-1] != eos:
        return ids
    written = tokenizer.encode(text[-END_CHARS:], add_special_tokens=False)
    nums = [sum(1 for _ in itertools.takewhile(eos.__eq__, reversed(x))) for x in (ids, written)]
    return ids[:-1] if nums[0] > nums[1] else ids


def encode_within(
    tokenizer: Tokenizer, text: str, limit: int, *, add_special_tokens: bool
) -> list[int]:
    """Encode a text, or only its beginning if that has over 2 * `limit` tokens, to save time."""
    num_chars = CHARS_PER_TOKEN * limit
    while True:
        ids = tokenizer.encode(text[:num_chars], add_special_tokens=add_special_tokens)
        if num_chars >= len(text) or len(ids) > 2 * limit:
            return ids
        num_chars *= 4


def num_tokens(prompt: Prompt, limit: int) -> str:
    """Describe the number of tokens of a prompt that was rendered with this limit."""
    is_cut = len(prompt.ids) > 2 * limit and len(prompt.text) > CHARS_PER_TOKEN * limit
    return f"over {2 * limit}" if is_cut else str(len(prompt.ids))


def load_prompts(
    config: Config, files: str | Sequence[str], num_rows: int | None, tokenizer: Tokenizer,
    tools: Sequence[Schema] = (), reserved: Sequence[str] = (), columns: Columns = ALL_ROWS,
) -> list[Prompt]:  # fmt: skip
    """Load the training or validation prompts of a run by its `data` options, in file order.

    `reserved`: control tokens that rows may not contain (`verl.data.outside.strings_of_rows`).
    `columns` choose the rows, of which `num_rows` are used.

    Prompts over `max_start_length` are left out and counted in the log. Raises DataError for
    malformed rows, and if no prompt is left.
    """
    limit = config.data.max_start_length
    rows = load_rows(files, columns=columns.names)
    matching = columns.matching(rows)
    if columns.wanted:
        logger.info("data.filter: %d of %d rows", len(matching), len(rows))
    rows = choose(matching, num_rows)
    rows = neutral_rows(rows, reserved)
    if hopeless := [row.uid for row in rows if not any(map(can_be_given, row.ground_truth))]:
        logger.warning("%d of %d rows have no answer that exact match can accept, such as %s",
                       len(hopeless), len(rows), hopeless[0])  # fmt: skip
    kept: list[Prompt] = []
    overlong: list[str] = []
    longest: tuple[int, str] = (0, "")
    for row in rows:  # one at a time: of those left out, no text is kept
        prompt = render(row, tokenizer, tools, limit)
        if len(prompt.ids) <= limit:
            kept.append(prompt)
        else:
            overlong.append(row.uid)
            longest = max(longest, (len(prompt.ids), num_tokens(prompt, limit)))
    if overlong:
        _report_overlong(overlong, len(rows), longest[1], config, bool(kept))
    return kept


def warn_of_common(train: Sequence[Prompt], val: Sequence[Prompt]) -> None:
    """Log how many validation prompts are trained on too, whose scores are no measure."""
    uids = {prompt.text: prompt.uid for prompt in train}
    common = [prompt for prompt in val if prompt.text in uids]
    if common:
        logger.warning(
            "%d of %d questions of data.val_files stand in data.train_files too, such as %s = %s: "
            "their scores do not measure what was learnt",
            len(common), len(val), common[0].uid, uids[common[0].text],
        )  # fmt: skip


def _report_overlong(
    overlong: Sequence[str], num_rows: int, longest: str, config: Config, is_any_kept: bool
) -> None:
    """Log the number of over-long prompts, or raise DataError with the first of them."""
    limit = config.data.max_start_length
    count = f"{len(overlong)} of {num_rows} prompts over {limit} tokens (longest {longest})"
    if is_any_kept:
        logger.warning("left out %s: data.max_start_length=%d", count, limit)
        return
    first = ", ".join(overlong[:5])
    fix = f"raise data.max_start_length to {longest}, or shorten these rows"
    raise DataError(explain("data.max_start_length", f"{count}: {first}", "prompts that fit", fix))
