"""Checks of a model's files before ranks and engines start.

`check_model` checks a whole folder: config, weights (by the headers of the files), tokenizer, chat
template and generation defaults. Values of weights are checked where they are loaded anyway
(`check_finite`). No code of the model runs unless `trust_remote_code` allows it.
"""

import contextlib
import datetime
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from verl.quantization import check_unquantized, quantization_of
from verl.remote_code import trusts_remote_code

FIX = "download it again, or give the model that the files belong to"
MAPPED_FILES = "model*.safetensors"
FINGERPRINT_FORM = "2:"
"""Beginning of fingerprints of weights; the hash of names and sizes, `:` and that of the content
follow. Without it, they are of an earlier form."""
FINGERPRINT_BYTES = 1 << 20
"""Bytes at each end of a weight file that go into its fingerprint."""
NUM_SAMPLES, SAMPLE_BYTES = 257, 4096
"""Equal parts of a weight file, and bytes at the beginning of each that go into its fingerprint.
The number is a prime: were it a multiple of that of the layers, samples would fall on the same few
matrices in each."""
FLOATS = ("F64", "F32", "BF16", "F16")
"""Floating-point dtypes, as safetensors headers name them."""
QUESTION = "Where is Oslo?"
SAMPLE = QUESTION + "  <answer>1234 Ünïcode\t日本 🙂</answer>\n\ndon't stop HERE, 3.14"
"""Text that tokenizers with the same vocabulary may still split differently."""
TEMPLATE_KWARGS = "chat_template_kwargs"
OWN_TEMPLATE_KWARGS = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "tokenize", "strftime_now",
    "continue_final_message", "chat_template",
})  # fmt: skip
"""Arguments of a chat template that the run sets itself."""
TEMPLATE_DATE = datetime.date(2024, 7, 26)
"""The day that chat templates take for today (Llama 3's own, where there is no clock). The prompts
of a run, its resume, its replay and its evaluations must not differ by the day."""


class ModelProblem(ValueError):
    """A problem with a model, described by our own message."""


@contextlib.contextmanager
def model_errors(
    path: str, part: str = "", subject: str = "model path",
    expected: str = "a whole folder of a Hugging Face causal language model", fix: str = FIX,
) -> Iterator[None]:  # fmt: skip
    """Turn any error of the body into a one-line ModelError about a model, or `part` of it."""
    try:
        yield
    except UserError:
        raise
    # Parsers raise all kinds of errors for a damaged file, and tokenizers a bare Exception.
    except Exception as error:
        got = f"{path} ({part + ': ' if part else ''}{describe_error(error)})"
        if "custom code" in str(error):
            expected = "a model without code of its own, which would run with your permissions"
            fix = "trust_remote_code=true (--trust-remote-code), once you have read that code"
        raise ModelError(explain(subject, got, expected, fix)) from error


def describe_error(error: BaseException) -> str:
    """Describe an error in one line; its class is added unless the message is ours."""
    text = " ".join(re.sub(r"\x1b\[\d*m", "", str(error)).split())[:200]
    class_name = "" if isinstance(error, ModelProblem) else type(error).__name__
    return ": ".join(filter(None, (class_name, text)))


def summarise(names: Iterable[str]) -> str:
    """Return the first three names in order, and the number of all."""
    ordered = sorted(names)
    return f"{', '.join(ordered[:3])} ({len(ordered)} in all)"


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the tables that transformers logs; our own one-line errors replace them."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # bars of many actors would overwrite each other
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def read_config(path: str, subject: str = "model path") -> PretrainedConfig:
    """Read the config.json of a model's folder. Raises ModelError."""
    with model_errors(path, "", subject):
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise ModelProblem("a file" if folder.exists() else "no such folder")
        if not (folder / "config.json").is_file():
            raise ModelProblem("a folder without config.json")
    with model_errors(path, "config.json", subject), quiet_transformers():
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trusts_remote_code(), local_files_only=True
        )
        return config


def rope_parameters(text: PretrainedConfig) -> list[Mapping[str, Any]]:
    """Return the rotary embedding parameters, for each kind of layer if they differ."""
    rope = getattr(text, "rope_parameters", None) or {}
    return [parameters for parameters in (rope, *rope.values()) if isinstance(parameters, Mapping)]


def num_positions(config: PretrainedConfig) -> int | None:
    """Return a model's context length, including RoPE scaling; None if its config states none."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    lengths = [positions]
    for parameters in rope_parameters(text):
        # Some configs (Llama 3.1, DeepSeek) state the scaled length already.
        original = parameters.get("original_max_position_embeddings") or positions
        lengths.append(int(original * (parameters.get("factor") or 1)))
    return max(lengths)


def check_context(
    config: PretrainedConfig, path: str, data: DataConfig, prompt: str, response: str
) -> None:
    """Raise ConfigError if dialogues exceed the context; `prompt`, `response`: option names."""
    with model_errors(path, "config.json"):
        context = num_positions(config)
    if context is not None and data.max_model_len > context:
        got = f"{data.max_prompt_length} with {response} {data.max_response_length}"
        expected = f"at most {context} together, the context of {path}"
        fix = f"at most {max(1, context - data.max_response_length)} here, or a shorter response"
        raise ConfigError(explain(prompt, got, expected, fix))


def check_weights(
    path: str, config: PretrainedConfig, needs_head: bool, by_transformers: bool,
    subject: str = "model path",
) -> int:  # fmt: skip
    """Check a folder's weights against its config, and return the number of embedding rows.

    The comparison is skipped for quantized models, and without `by_transformers` also for models
    that transformers does not know: only their engine may be able to load them. Raises ModelError.
    """
    folder = Path(path).expanduser()
    with model_errors(path, "weights", subject), quiet_transformers():
        single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
        if single.exists() and index.exists() and indexed_files(index) != {single.name}:
            raise ModelProblem(f"both {single.name} and {index.name}: only one of them is read")
        dtypes: dict[str, str] = {}
        for file in sorted(folder.glob(MAPPED_FILES)):
            dtypes.update(_header(file, subject))
        is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        if quantization_of(config.to_dict()) or not (by_transformers or is_known):
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


def weights_fingerprint(base: str, like: str | None = None) -> str:
    """Return a short hash of a model folder's weight files: names, sizes and parts of the content.

    Given a saved fingerprint, `like`, the result has its form, so that it can be compared. A hub
    name, which has no local files, is its own fingerprint.
    """
    if like is not None and not like.startswith(FINGERPRINT_FORM):
        return _earlier_fingerprint(base)
    folder = Path(base).expanduser()
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*model*.bin"))
    if not files:
        return base
    layout, content = hashlib.sha256(), hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        layout.update(f"{path.name} {size} ".encode())
        with path.open("rb", buffering=0) as file:
            for offset, num_bytes in _fingerprinted(size):
                file.seek(offset)
                content.update(file.read(num_bytes))
    return f"{FINGERPRINT_FORM}{layout.hexdigest()[:8]}:{content.hexdigest()[:16]}"


def are_other_weights(first: str, second: str) -> bool:
    """Whether two fingerprints are certainly of different weights.

    So they are if the files have the same names and sizes; the same weights may also be written
    to other files, or in another dtype. Fingerprints of an earlier form do not say.
    """
    layouts = {first.rpartition(":")[0], second.rpartition(":")[0]}
    return first != second and len(layouts) == 1 and first.startswith(FINGERPRINT_FORM)


def _fingerprinted(size: int) -> Iterator[tuple[int, int]]:
    """Yield the offset and length of the parts of a file of `size` bytes that are read."""
    yield from ((0, FINGERPRINT_BYTES), (max(0, size - FINGERPRINT_BYTES), FINGERPRINT_BYTES))
    if size > 2 * FINGERPRINT_BYTES:
        yield from ((size * i // NUM_SAMPLES, SAMPLE_BYTES) for i in range(1, NUM_SAMPLES))


def _earlier_fingerprint(base: str) -> str:
    """Return the fingerprint as it was until 2026-11-30: names, sizes and the ends of each file."""
    digest = hashlib.sha256()
    files = sorted(Path(base).expanduser().glob("*.safetensors"))
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(FINGERPRINT_BYTES))
            file.seek(max(0, size - FINGERPRINT_BYTES))
            digest.update(file.read(FINGERPRINT_BYTES))
    return digest.hexdigest()[:16] if files else base


def indexed_files(index: Path) -> set[str]:
    """Return the names of the files that an index lists."""
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())


def _header(file: Path, subject: str) -> Iterator[tuple[str, str]]:
    """Yield the name and dtype of each tensor of a file. Raises ModelError if it is truncated."""
    with model_errors(str(file), subject=subject):
        file.open("rb").close()  # safetensors reports an unreadable file as missing
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_slice(name).get_dtype()


def check_loading_report(lm: PreTrainedModel, report: Mapping[str, Any], needs_head: bool) -> None:
    """Raise ModelProblem for missing or unexpected weights, and for weights of the wrong shape.

    `report` is the loading info of transformers, which initialises missing weights at random.
    Without `needs_head` (a critic has its own head), weights outside the trunk are ignored.
    """
    prefix = "" if needs_head else f"{lm.base_model_prefix}."
    shapes = {name: f"{name} {list(actual)} instead of {list(expected)}"
              for name, actual, expected in report["mismatched_keys"]}  # fmt: skip
    for problem, names in (
        ("missing", report["missing_keys"]),
        ("unexpected", report["unexpected_keys"]),
        ("wrong shape of", shapes),
    ):
        descriptions = [shapes.get(name, name) for name in names if name.startswith(prefix)]
        if descriptions:
            raise ModelProblem(f"{problem} {summarise(descriptions)}")
    if report["error_msgs"]:
        raise ModelProblem(str(report["error_msgs"][0]))


def check_finite(tensors: Iterable[tuple[str, Tensor]], subject: str = "weights") -> None:
    """Raise ModelError if a tensor has NaN or infinite values."""
    refuse_non_finite([name for name, values in tensors if not is_finite(values)], subject)


def check_finite_files(path: str, subject: str) -> None:
    """Raise ModelError if a file of the folder has NaN or infinite values; reads all files."""
    for file in sorted(Path(path).glob(MAPPED_FILES)):
        with safe_open(file, framework="pt") as tensors:
            named = ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118
            check_finite(named, f"{subject} {file}")


def refuse_non_finite(names: Sequence[str], subject: str = "weights") -> None:
    """Raise ModelError if `names`, those of tensors with NaN or infinite values, is not empty."""
    if names:
        got = f"NaN or infinite values in {summarise(names)}"
        raise ModelError(explain(subject, got, "finite numbers", FIX))


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite, computed in one pass without a temporary of their size."""
    if not values.is_floating_point() or values.dtype.itemsize < 2 or not values.numel():
        return True
    low, high = values.detach().aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def check_model(
    subject: str, path: str, *, needs_head: bool = True, by_transformers: bool = True,
    tokenizer_of: str | None = None, may_be_quantized: bool = False, has_weights: bool = True,
) -> PretrainedConfig:  # fmt: skip
    """Check a model's folder and return its config. Only the headers of the weights are read.

    With `has_weights` false they are not there yet, and not checked.

    For a critic, `needs_head` is false, and `tokenizer_of` is the model whose tokens it reads. Only
    a model that is not trained may be quantized.
    Raises ModelError, whose one line begins with `subject`.
    """
    config = read_config(path, subject)
    if not may_be_quantized:
        raw_config, _ = PretrainedConfig.get_config_dict(Path(path).expanduser())
        check_unquantized(subject, path, raw_config)
    with model_errors(path, "generation_config.json", subject), quiet_transformers():
        eos_ids = _eos_ids(Path(path).expanduser(), config)
    if has_weights:
        num_rows = check_weights(path, config, needs_head, by_transformers, subject)
    else:
        with model_errors(path, "config.json", subject):
            num_rows = int(config.get_text_config().vocab_size)
    tokenizer = load_tokenizer(tokenizer_of or path, subject)
    too_large = {token: id for token, id in tokenizer.get_vocab().items() if id >= num_rows}
    # Special tokens that our texts never contain: text-only Gemma 3 has one for images.
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    unused = special - {tokenizer.bos_token, tokenizer.eos_token}
    embedding = f"an embedding of {num_rows} rows"
    with model_errors(path, subject=subject):
        if too_large.keys() - unused:
            largest = max(too_large.values())
            raise ModelProblem(f"a tokenizer with ids up to {largest} over {embedding}")
        for eos_id in eos_ids:
            if not isinstance(eos_id, int) or not 0 <= eos_id < num_rows:
                raise ModelProblem(f"eos_token_id={eos_id!r} over {embedding}")
    if tokenizer_of is None:
        check_template(tokenizer, path, subject)
    return config


def _eos_ids(folder: Path, config: PretrainedConfig) -> list[Any]:
    """Return the end-of-sequence ids of the model's generation defaults."""
    if (folder / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    else:
        generation = GenerationConfig.from_model_config(config)
    ids = generation.eos_token_id
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def load_tokenizer(
    path: str, subject: str = "model path", template_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Load the tokenizer of a model folder or hub name. Raises ModelError.

    Whoever renders its chat template, the template gets `template_kwargs`, and takes
    `TEMPLATE_DATE` for today. Raises ConfigError for arguments that are ours or that the template
    does not know.
    """
    with model_errors(path, "tokenizer", subject):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusts_remote_code())
        # If files are missing, transformers may return a tokenizer that drops all text.
        if not tokenizer.encode(QUESTION, add_special_tokens=False):
            raise ModelProblem("text is encoded to no ids")
    options = dict(template_kwargs or {})
    check_template_kwargs(tokenizer.chat_template, options)
    tokenizer.apply_chat_template = functools.partial(  # type: ignore[method-assign]
        tokenizer.apply_chat_template, strftime_now=template_date, **options
    )
    return tokenizer


def check_template_kwargs(template: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that the template does not know, or that are set here."""
    text = json.dumps(template, ensure_ascii=False) if template else ""
    for name in options:
        is_known = re.search(rf"\b{re.escape(name)}\b", text)
        if name in OWN_TEMPLATE_KWARGS or not is_known:
            got = f"{name}, which {'is set by the run' if is_known else 'it does not read'}"
            expected = "arguments that the model's chat template reads"
            raise ConfigError(explain(TEMPLATE_KWARGS, got, expected, f"leave {name} out"))


def template_date(format: str) -> str:
    """Format the date that chat templates print instead of today's."""
    return TEMPLATE_DATE.strftime(format)


def tokenizer_identity(tokenizer: Any) -> dict[str, str]:
    """Return fingerprints of the ids that a prompt becomes, however the files are written."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    behaviour = [vocabulary, tokenizer.special_tokens_map, tokenizer.encode(SAMPLE)]
    parts = {"tokenizer": behaviour, "chat_template": tokenizer.chat_template}
    texts = {name: json.dumps(part, default=str, sort_keys=True) for name, part in parts.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def check_template(tokenizer: Any, path: str, subject: str = "model path") -> None:
    """Raise ModelError for a chat template that fails or drops the question."""
    if tokenizer.chat_template is None:
        return
    with model_errors(path, "chat template", subject):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
        )
        if QUESTION not in text:
            raise ModelProblem("leaves the user's words out")
