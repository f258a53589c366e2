"""Whether tokenizer, chat template and sampling defaults of a model can be used.

`check_model` holds a whole model folder together, weights included: the one check before anything
that loads a model.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

from verl.model_files import Unfit, check_weights, model_errors, one_line, quiet, read_config
from verl.remote_code import trusts_remote_code

QUESTION = "Where is Oslo?"
SAMPLE = QUESTION + "  <answer>1234 Ünïcode\t日本 🙂</answer>\n\ndon't stop HERE, 3.14"
"""Letters, figures, blanks and tags: what tokenizers of one vocabulary cut differently."""
TEMPLATE_S = 5.0
"""Processor time that a chat template may take for one question."""
TEMPLATE_BYTES = 1 << 30
"""Memory that it may take beyond what this process has."""


def check_model(
    subject: str, path: str, *, needs_head: bool = True, by_transformers: bool = True,
    tokenizer_of: str | None = None,
) -> PretrainedConfig:  # fmt: skip
    """The config of a folder that can be loaded and is the model that it says.

    A critic needs no head and reads the tokens of another model, `tokenizer_of`. Reads headers
    only. Raises ModelError, whose one line begins with `subject`.
    """
    config = read_config(path, subject)
    with model_errors(path, "generation_config.json", subject), quiet():
        ends = _ends(Path(path).expanduser(), config)
    rows = check_weights(path, config, needs_head, by_transformers, subject)
    tokenizer = load_tokenizer(tokenizer_of or path, subject)
    beyond = {token: id for token, id in tokenizer.get_vocab().items() if id >= rows}
    with model_errors(path, subject=subject):
        if beyond.keys() - _spare(tokenizer):
            largest = max(beyond.values())
            raise Unfit(f"a tokenizer with ids up to {largest} over an embedding of {rows} rows")
        for end in ends:
            if not isinstance(end, int) or not 0 <= end < rows:
                raise Unfit(f"eos_token_id={end!r} over an embedding of {rows} rows")
    if tokenizer_of is None:
        check_template(tokenizer, path, subject)
    return config


def _spare(tokenizer: Any) -> set[str]:
    """Special tokens that no text of ours has: Gemma 3 of text alone has one for images."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return special - {tokenizer.bos_token, tokenizer.eos_token}


def _ends(folder: Path, config: PretrainedConfig) -> list[Any]:
    """What ends a sequence, by the model's defaults of sampling."""
    if (folder / "generation_config.json").exists():
        found = GenerationConfig.from_pretrained(folder, local_files_only=True)
    else:
        found = GenerationConfig.from_model_config(config)
    ends = found.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def load_tokenizer(path: str, subject: str = "model path") -> Any:
    """The tokenizer of a model folder or hub name. Raises ModelError."""
    with model_errors(path, "tokenizer", subject):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusts_remote_code())
        # Where files lack, transformers may make one that knows no text.
        if not tokenizer.encode(QUESTION, add_special_tokens=False):
            raise Unfit("no ids come of text")
        return tokenizer


def tokenizer_identity(tokenizer: Any) -> dict[str, str]:
    """Fingerprints of what decides which ids a prompt becomes, however its files are written."""
    tokens = [sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map,
              tokenizer.encode(SAMPLE)]  # fmt: skip
    parts = {"tokenizer": tokens, "chat_template": tokenizer.chat_template}
    texts = {name: json.dumps(part, default=str, sort_keys=True) for name, part in parts.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def check_template(tokenizer: Any, path: str, subject: str = "model path") -> None:
    """Refuse a chat template that raises, does not end, or leaves the question out."""
    if tokenizer.chat_template is None:
        return
    context = multiprocessing.get_context("fork")  # it may hang within one call of C
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_render, args=(tokenizer, sender), daemon=True)
    child.start()
    sender.close()
    problem = f"takes more than {TEMPLATE_S:g} s for one question"
    try:
        if receiver.poll(20 * TEMPLATE_S):  # the clock's, where the machine is busy
            problem = receiver.recv()
    except EOFError:
        pass  # the kernel ended it
    child.kill()
    child.join()
    with model_errors(path, "chat template", subject):
        if problem:
            raise Unfit(problem)


def _render(tokenizer: Any, answer: Connection) -> None:
    """Send what is wrong with the template; the kernel ends this process when its time is up."""
    memory = psutil.Process().memory_info().vms + TEMPLATE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_S)
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
        )
        answer.send("" if QUESTION in text else "leaves the user's words out")
    except Exception as error:  # noqa: BLE001 - it is the answer
        answer.send(one_line(error))
    os._exit(0)  # nothing of the parent is to be ended here
