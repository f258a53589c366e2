"""Whether a model's files make a model that answers: told before ranks and engines start.

Names, shapes and dtypes come from the headers of the files; values are looked at where they are
read anyway (`check_finite`); tokenizer, chat template and sampling defaults are tried.
`check_model` holds a whole folder together. No file of a model runs code here, unless
`trust_remote_code` lets it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import re
import resource
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging

from verl.config import DataConfig
from verl.errors import ConfigError, ModelError, UserError, explain
from verl.remote_code import trusts_remote_code

FIX = "download it again, or give the model that the files belong to"
MAPPED_FILES = "model*.safetensors"
FLOATS = ("F64", "F32", "BF16", "F16")
"""As the header of a file of safetensors names them."""
COUNT_FIELDS = ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts")
MAX_COUNT = 2000
"""Layers or experts that any model has: a number far beyond would take for ever to build."""


QUESTION = "Where is Oslo?"
SAMPLE = QUESTION + "  <answer>1234 Ünïcode\t日本 🙂</answer>\n\ndon't stop HERE, 3.14"
"""Letters, figures, blanks and tags: what tokenizers of one vocabulary cut differently."""
TEMPLATE_S = 5.0
"""Processor time that a chat template may take for one question."""
TEMPLATE_BYTES = 1 << 30
"""Memory that it may take beyond what this process has."""


class ModelProblem(ValueError):
    """What is wrong with a model, in words of our own."""


@contextlib.contextmanager
def model_errors(
    path: str, part: str = "", subject: str = "model path",
    expected: str = "a whole folder of a Hugging Face causal language model", fix: str = FIX,
) -> Iterator[None]:  # fmt: skip
    """Raise ModelError, in one line, for whatever goes wrong with (a part of) a model."""
    try:
        yield
    except UserError:
        raise
    # Of a damaged file a parser raises whatever it trips over, tokenizers a bare Exception.
    except Exception as error:
        got = f"{path} ({part + ': ' if part else ''}{describe_error(error)})"
        if "custom code" in str(error):
            expected = "a model that brings no code of its own, which would act as you"
            fix = "trust_remote_code=true (--trust-remote-code), once you have read that code"
        raise ModelError(explain(subject, got, expected, fix)) from error


def describe_error(error: BaseException) -> str:
    """An error in one line, with its kind where the words are not ours."""
    text = " ".join(re.sub(r"\x1b\[\d*m", "", str(error)).split())[:200]
    kind = "" if isinstance(error, ModelProblem) else type(error).__name__
    return ": ".join(filter(None, (kind, text)))


def summarise(names: Iterable[str]) -> str:
    """The first few of some names, and how many there are."""
    found = sorted(names)
    return f"{', '.join(found[:3])} ({len(found)} in all)"


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the tables that transformers logs of what is told in one line here."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # many actors would draw over each other
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def read_config(path: str, subject: str = "model path") -> PretrainedConfig:
    """The config.json of a model's folder. Raises ModelError."""
    with model_errors(path, "", subject):
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise ModelProblem("a file" if folder.exists() else "no such folder")
        if not (folder / "config.json").is_file():
            raise ModelProblem("a folder without config.json")
        for file in folder.iterdir():  # a pipe or device would be read for ever, or left out
            if file.exists() and not (file.is_file() or file.is_dir()):
                raise ModelProblem(f"{file.name}, which is not a regular file")
    with model_errors(path, "config.json", subject), quiet_transformers():
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trusts_remote_code(), local_files_only=True
        )
        for name in COUNT_FIELDS:
            found = getattr(config.get_text_config(), name, None) or 0
            if found > MAX_COUNT:
                raise ModelProblem(f"{name}={found}")
        check_numbers(config.get_text_config())
        return config


def check_numbers(text: PretrainedConfig) -> None:
    """Raise Unfit for numbers under which every answer would be noise, or not a number."""
    for name, value in text.to_dict().items():
        is_small = not isinstance(value, int | float) or 0 <= value < 1  # never true of NaN
        if name.endswith(("_eps", "_epsilon")) and not is_small:
            raise ModelProblem(f"{name}={value}")
    for part in rope_parameters(text):
        for name, least in {"factor": 1.0, "rope_theta": 1.0}.items():
            value = part.get(name)
            if isinstance(value, int | float) and not least <= value < math.inf:
                raise ModelProblem(f"{name}={value} of its rotary positions")


def rope_parameters(text: PretrainedConfig) -> list[Mapping[str, Any]]:
    """The parameters of its rotary positions, where layers differ those of each kind."""
    scaling = getattr(text, "rope_parameters", None) or {}
    return [part for part in (scaling, *scaling.values()) if isinstance(part, Mapping)]


def num_positions(config: PretrainedConfig) -> int | None:
    """Tokens that a model was made for, stretched as its config says; None where none are told."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    factors = [part.get("factor") or 1 for part in rope_parameters(text)]
    return int(positions * max(1, *factors)) if isinstance(positions, int) else None


def check_context(
    config: PretrainedConfig, path: str, data: DataConfig, prompt: str, response: str
) -> None:
    """Raise ConfigError for a dialogue that a model has no positions for; two options set it."""
    with model_errors(path, "config.json"):
        most = num_positions(config)
    if most is not None and data.max_model_len > most:
        got = f"{data.max_prompt_length} beside {response} {data.max_response_length}"
        expected = f"at most {most} together, the context of {path}"
        fix = f"at most {max(1, most - data.max_response_length)} here, or a shorter response"
        raise ConfigError(explain(prompt, got, expected, fix))


def check_weights(
    path: str, config: PretrainedConfig, needs_head: bool, by_transformers: bool,
    subject: str = "model path",
) -> int:  # fmt: skip
    """Hold a folder's weights against the model that `config` says; returns the embedding's rows.

    What transformers does not load, or is quantized, may be of a kind that only its engine knows.
    Raises ModelError.
    """
    folder = Path(path).expanduser()
    with model_errors(path, "weights", subject), quiet_transformers():
        single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
        if single.exists() and index.exists() and indexed_files(index) != {single.name}:
            raise ModelProblem(
                f"both {single.name} and {index.name}: a reader takes one or the other"
            )
        dtypes = {name: dtype for file in sorted(folder.glob(MAPPED_FILES))
                  for name, dtype in _header(file, subject)}  # fmt: skip
        is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        if getattr(config, "quantization_config", None) or not (by_transformers or is_known):
            return int(config.get_text_config().vocab_size)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, device_map="meta", output_loading_info=True,
            ignore_mismatched_sizes=True, trust_remote_code=trusts_remote_code(),
        )  # fmt: skip
        lm, report = loaded
        check_loading_report(lm, report, needs_head)
        odd = [name for name, _ in lm.named_parameters() if dtypes.get(name, "F32") not in FLOATS]
        if odd:
            raise ModelProblem(f"no floating-point numbers in {summarise(odd)}")
        return int(lm.get_input_embeddings().weight.shape[0])


def indexed_files(index: Path) -> set[str]:
    """The files that an index names."""
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())


def _header(file: Path, subject: str) -> Iterator[tuple[str, str]]:
    """Name and dtype of each tensor of a file that is as long as it says."""
    with model_errors(str(file), subject=subject):
        file.open("rb").close()  # safetensors says of what may not be read that it is not there
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_slice(name).get_dtype()


def check_loading_report(lm: PreTrainedModel, report: Mapping[str, Any], needs_head: bool) -> None:
    """Refuse weights that a model lacks, has no place for, or has in another shape.

    `report` is the loading info of transformers, which makes random numbers of what lacks. A
    critic brings a head of its own, so that any other is neither needed nor in the way.
    """

    def counts(name: str) -> bool:
        return needs_head or name.startswith(f"{lm.base_model_prefix}.")

    shapes = {name: f"{name} {list(found)} instead of {list(wanted)}"
              for name, found, wanted in report["mismatched_keys"]}  # fmt: skip
    for what, found in (
        ("none for", report["missing_keys"]),
        ("no place for", report["unexpected_keys"]),
        ("shape of", shapes),
    ):
        names = [shapes.get(name, name) for name in found if counts(name)]
        if names:
            raise ModelProblem(f"{what} {summarise(names)}")
    if report["error_msgs"]:
        raise ModelProblem(str(report["error_msgs"][0]))


def check_finite(tensors: Iterable[tuple[str, Tensor]], subject: str = "weights") -> None:
    """Raise ModelError for tensors with values that are no finite numbers."""
    refuse_non_finite([name for name, values in tensors if not is_finite(values)], subject)


def check_finite_files(path: str, subject: str) -> None:
    """The same for the files of a folder, which are read for it."""
    for file in sorted(Path(path).glob(MAPPED_FILES)):
        with safe_open(file, framework="pt") as found:
            named = ((name, found.get_tensor(name)) for name in found.keys())  # noqa: SIM118
            check_finite(named, f"{subject} {file}")


def refuse_non_finite(names: Sequence[str], subject: str = "weights") -> None:
    """Raise ModelError if there are names of tensors whose values are no finite numbers."""
    if names:
        got = f"NaN or infinite values in {summarise(names)}"
        raise ModelError(explain(subject, got, "finite numbers", FIX))


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite: one pass, and no memory of their size."""
    if not values.is_floating_point() or values.dtype.itemsize < 2 or not values.numel():
        return True
    low, high = values.detach().aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def check_model(
    subject: str, path: str, *, needs_head: bool = True, by_transformers: bool = True,
    tokenizer_of: str | None = None,
) -> PretrainedConfig:  # fmt: skip
    """The config of a folder that can be loaded and is the model that it says.

    A critic needs no head and reads the tokens of another model, `tokenizer_of`. Reads headers
    only. Raises ModelError, whose one line begins with `subject`.
    """
    config = read_config(path, subject)
    with model_errors(path, "generation_config.json", subject), quiet_transformers():
        ends = _eos_ids(Path(path).expanduser(), config)
    rows = check_weights(path, config, needs_head, by_transformers, subject)
    tokenizer = load_tokenizer(tokenizer_of or path, subject)
    beyond = {token: id for token, id in tokenizer.get_vocab().items() if id >= rows}
    # Special tokens that no text of ours has: Gemma 3 of text alone has one for images.
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    spare = special - {tokenizer.bos_token, tokenizer.eos_token}
    with model_errors(path, subject=subject):
        if beyond.keys() - spare:
            largest = max(beyond.values())
            raise ModelProblem(
                f"a tokenizer with ids up to {largest} over an embedding of {rows} rows"
            )
        for end in ends:
            if not isinstance(end, int) or not 0 <= end < rows:
                raise ModelProblem(f"eos_token_id={end!r} over an embedding of {rows} rows")
    if tokenizer_of is None:
        check_template(tokenizer, path, subject)
    return config


def _eos_ids(folder: Path, config: PretrainedConfig) -> list[Any]:
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
            raise ModelProblem("no ids come of text")
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
            raise ModelProblem(problem)


def _render(tokenizer: Any, answer: Connection) -> None:
    """Send what is wrong with the template; the kernel ends this process when its time is up."""
    memory = psutil.Process().memory_info().vms + TEMPLATE_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)  # which only root may raise
    memory = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_AS, (memory, hard))
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_S)
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
        )
        answer.send("" if QUESTION in text else "leaves the user's words out")
    except Exception as error:  # noqa: BLE001 - it is the answer
        answer.send(describe_error(error))
    os._exit(0)  # nothing of the parent is to be ended here
