"""Finds misspelt fields among those of a request that its model does not know."""

import itertools
from collections.abc import Collection

from fastapi import HTTPException
from pydantic import BaseModel

from search_r1.retrieval.service.requests import MAX_PROBLEMS, problem
from verl.errors import misspelt

MAX_NAME = 40
"""Longest unknown field, in characters, that is compared with known ones."""


def refuse_misspelt_fields(request: BaseModel) -> None:
    """Raise a 422 for unknown fields that look like known ones."""
    details = [
        problem((name,), fix, "extra_forbidden") for name, fix in misspelt_fields(request).items()
    ]
    if details:
        raise HTTPException(422, details)


def misspelt_fields(request: BaseModel, harmless: Collection[str] = ()) -> dict[str, str]:
    """Return the unknown fields of a request that look like a known one, each with its fix.

    Other unknown fields are ignored, so that clients of other servers can ask this one.
    *Example*: `top_k`, which would leave `topk` at its default. Looks at `MAX_PROBLEMS` fields.
    """
    known = type(request).model_fields
    names = itertools.islice(request.model_extra or {}, MAX_PROBLEMS)
    fixes = {
        name: misspelt(name, known)
        for name in names
        if len(name) <= MAX_NAME and name not in harmless
    }
    return {name: f"unknown field; {fix}" for name, fix in fixes.items() if fix}
