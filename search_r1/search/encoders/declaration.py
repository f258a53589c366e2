"""What a model folder says of itself in sentence-transformers' files: modules, pooling, prompts."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from search_r1.search.encoders.families import Family
from search_r1.search.errors import SetupError

POOLINGS = ("mean", "cls", "pooler")
FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
QUERY_PROMPTS = ("query",)
PASSAGE_PROMPTS = ("passage", "document", "corpus")

Find = Callable[[str], str | None]
"""The local path of a model's file by its name inside the model folder; None if it has none."""


@dataclass(frozen=True)
class Declaration:
    """How a model is used: from its own files, else from its family, else from the flags."""

    pooling: str | None
    normalizes: bool
    query_prefix: str = ""
    passage_prefix: str = ""
    max_length: int | None = None
    """Tokens of a text that the folder says to encode."""
    subfolder: str = ""
    """Where the transformer lies inside the model folder."""
    is_from_folder: bool = False
    """Whether pooling and normalisation are the folder's own word."""
    needs_modules: bool = False
    """Whether its modules do more than a transformer, its pooling and a normalisation."""


def read_declaration(find: Find, family: Family) -> Declaration:
    """What the folder declares, and for what it leaves open what its family does.

    Raises SetupError for files that are not JSON.
    """
    by_family = Declaration(
        family.pooling, family.normalizes, family.query_prefix, family.passage_prefix
    )
    modules = _read(find, "modules.json")
    if not modules:
        return by_family
    declared = _with_prompts(_modules(find, modules), find)
    if declared.query_prefix or declared.passage_prefix:
        return declared
    return replace(declared, query_prefix=family.query_prefix, passage_prefix=family.passage_prefix)


def _modules(find: Find, modules: Any) -> Declaration:
    """Pooling, normalisation and length of the list in `modules.json`."""
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        return Declaration(None, kinds[-1] == "Normalize", is_from_folder=True, needs_modules=True)
    pooling = _pooling(_read(find, f"{modules[1]['path']}/config.json"))
    subfolder = modules[0]["path"]
    facts = _read(find, f"{subfolder}/sentence_bert_config.json".lstrip("/"))
    return Declaration(
        pooling,
        kinds[-1] == "Normalize",
        max_length=facts.get("max_seq_length"),
        subfolder=subfolder,
        is_from_folder=True,
        needs_modules=pooling is None or facts.get("do_lower_case", False),
    )


def _pooling(facts: Mapping[str, Any]) -> str | None:
    """Mean or cls; None for any other pooling, and for several at once."""
    mode = facts.get("pooling_mode")
    if isinstance(mode, str):
        return mode if mode in POOLINGS else None
    modes = [name for name, is_on in facts.items() if is_on and name.startswith("pooling_mode_")]
    return FLAGS.get(modes[0]) if len(modes) == 1 else None


def _with_prompts(declared: Declaration, find: Find) -> Declaration:
    """With the prefixes that the folder itself names for queries and passages, if it does."""
    prompts = _read(find, "config_sentence_transformers.json").get("prompts") or {}
    query = next((prompts[name] for name in QUERY_PROMPTS if prompts.get(name)), "")
    passage = next((prompts[name] for name in PASSAGE_PROMPTS if prompts.get(name)), "")
    return replace(declared, query_prefix=query, passage_prefix=passage)


def _read(find: Find, name: str) -> Any:
    """The JSON of a model's file; an empty mapping if it has none."""
    path = find(name)
    if path is None:
        return {}
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise SetupError(
            f"{path} is not JSON ({error}); expected a complete model folder: download it again"
        ) from error
