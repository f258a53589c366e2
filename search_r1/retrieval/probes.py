"""Tells encoders apart by how they embed a probe text, which an index's manifest keeps."""

import math
from collections.abc import Sequence
from pathlib import Path

from search_r1.retrieval.errors import IndexMismatch
from search_r1.retrieval.manifest import Manifest

PROBE_TEXT = '"Paris"\nParis is the capital of France.'


def check_probe(
    manifest: Manifest, folder: Path | str, encoder: str, probe: Sequence[float]
) -> None:
    """Raise IndexMismatch unless `probe` equals the embedding at indexing (cosine >= 0.99)."""
    scale = math.hypot(*manifest.probe) * math.hypot(*probe)
    product = sum(x * y for x, y in zip(manifest.probe, probe, strict=False))
    similarity = product / scale if scale else 0.0
    if len(probe) != manifest.dim or not similarity >= 0.99:  # also true for NaN
        raise IndexMismatch(
            f"index {folder} was built with encoder {manifest.encoder!r} ({manifest.dim} "
            f"dimensions), but {encoder!r} ({len(probe)} dimensions) embeds a probe text "
            f"differently (cosine {similarity:.3f}, expected 0.99); give the same --retriever_model"
        )
