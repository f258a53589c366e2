"""Recognises the family of a model folder of another name, and compares prefixes with an index's.

A folder's own prompts and `--encoder_family` come first. An index's manifest is never contradicted:
what was built without prefixes is searched without them.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_r1.retrieval.encoder import Encoder, HashEncoder
from search_r1.retrieval.encoders.families import (
    FAMILIES,
    OTHER,
    Family,
    family_of,
    model_folder,
    model_name,
)
from search_r1.retrieval.errors import IndexMismatch
from search_r1.retrieval.manifest import Manifest
from search_r1.retrieval.settings import EncoderConfig
from verl.errors import explain

logger = logging.getLogger(__name__)


def recognised(
    config: EncoderConfig, retriever_name: str, manifest: Manifest | None = None
) -> EncoderConfig:
    """Return the settings with the family of a folder whose own name tells none.

    It is that of the name in its `config.json`, or else of the retriever. Only folders are
    recognised: a hub name is the model's own.
    """
    if config.encoder_family or not config.retriever_model or not _is_unknown(config):
        return config
    folder = _folder(config.retriever_model)
    if not folder.is_dir() or folder.parent.name == "snapshots" or _is_static(folder):
        return config
    for source, name in _names(folder, retriever_name):
        family = family_of(model_name(name))
        if family is not OTHER and (manifest is None or _fits(family, manifest)):
            logger.warning(
                "encoder %s is used as one of family %s, by %s; --encoder_family %s if it is none",
                folder.name, family.name, source, OTHER.name,
            )  # fmt: skip
            return replace(config, encoder_family=family.name)
    return config


def check_prefixes(
    encoder: Encoder,
    config: EncoderConfig,
    manifest: Manifest | None = None,
    index: Path | str = "",
) -> None:
    """Raise IndexMismatch if an index was built with other prefixes; warn if none are known.

    `config` is what `recognised` returned. A chosen family and declared prompts may differ; so may
    two models, and manifests without prefixes, since early ones did not keep them.
    """
    if config.encoder_family or getattr(encoder, "has_prompts", False):
        return
    kept = (manifest.query_prefix, manifest.passage_prefix) if manifest else ("", "")
    used = (encoder.query_prefix, encoder.passage_prefix)
    if manifest and any(kept) and kept != used and len(set(_models(config))) == 1:
        families = [f.name for f in FAMILIES if (f.query_prefix, f.passage_prefix) == kept]
        fix = f"give --retriever_model {manifest.encoder}, with which it was built"
        if families:
            fix = f"--encoder_family {families[0]} if it is {manifest.encoder}, or else {fix}"
        subject = f"prefixes of queries and passages of {encoder.name}"
        expected = f"{kept}, as in index {index}"
        raise IndexMismatch(explain(subject, str(used), expected, fix))
    is_static = getattr(encoder, "is_static", False)
    if _is_unknown(config) and not is_static and encoder.name != HashEncoder.name:
        logger.warning(
            "encoder %s is of no known family and declares no prompts, so queries and passages "
            "get no prefixes; --encoder_family e5, bge-en ... if it is one, or %s",
            encoder.name, OTHER.name,
        )  # fmt: skip


def _is_unknown(config: EncoderConfig) -> bool:
    """Whether no model's name tells its family."""
    return all(family_of(name) is OTHER for name in _models(config))


def _models(config: EncoderConfig) -> list[str]:
    """Return the names of the models for passages and for queries."""
    paths = (config.retriever_model, config.query_model)
    return [model_name(str(_folder(path))) for path in paths if path]


def _folder(path: str) -> Path:
    return model_folder(Path(path)) if path.endswith(".onnx") else Path(path)


def _names(folder: Path, retriever_name: str) -> Iterator[tuple[str, str]]:
    """Yield names that may tell the family, the surest first, each with where it is from."""
    if isinstance(name := _read(folder / "config.json", {}).get("_name_or_path"), str):
        yield f"config.json (_name_or_path {name!r})", name
    yield f"the retriever's name {retriever_name!r}", retriever_name


def _fits(family: Family, manifest: Manifest) -> bool:
    """Whether an index with this manifest can have been built as of this family."""
    is_same = (family.query_prefix, family.passage_prefix) == (
        manifest.query_prefix,
        manifest.passage_prefix,
    )
    return is_same and (family.normalizes or not manifest.normalizes)


def _is_static(folder: Path) -> bool:
    """Whether a folder's encoder is a table, for which no family has prefixes."""
    modules = _read(folder / "modules.json", [])
    return any("StaticEmbedding" in str(module) for module in modules)


def _read(file: Path, default: Any) -> Any:
    """Return a folder's JSON; the default if it is of another type, or unreadable.

    Whoever loads the model says what is wrong with a file.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return default
    return content if isinstance(content, type(default)) else default
