"""The OpenAPI of `POST /retrieve`, which is routed past FastAPI and so has to be described here."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from search_r1.search.schema import RetrieveRequest, RetrieveResponse
from search_r1.search.server.config import ServiceConfig
from search_r1.search.server.statuses import STATUSES

TEMPLATE = "#/components/schemas/{model}"


class Problem(BaseModel):
    """What is wrong: a sentence, or for 422 a list of places and messages."""

    detail: str | list[dict[str, Any]]


def describe(app: FastAPI, config: ServiceConfig) -> dict[str, Any]:
    """The whole OpenAPI document, with the limits of `config`."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = models_json_schema(
        [
            (RetrieveRequest, "validation"),
            (RetrieveResponse, "serialization"),
            (Problem, "serialization"),
        ],
        ref_template=TEMPLATE,
    )
    definitions = schemas["$defs"]
    _add_limits(definitions["RetrieveRequest"]["properties"], config)
    document.setdefault("components", {}).setdefault("schemas", {}).update(definitions)
    document.setdefault("paths", {})["/retrieve"] = {"post": _operation()}
    return document


def _operation() -> dict[str, Any]:
    errors = {
        str(status): {"description": text, "content": _json("Problem")}
        for status, text in STATUSES.items()
    }
    errors["503"]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    timing = {"Server-Timing": {"schema": {"type": "string"}, "description": "stages in ms"}}
    found = {
        "description": "documents, best first",
        "content": _json("RetrieveResponse"),
        "headers": timing,
    }
    return {
        "summary": "Search every query",
        "operationId": "retrieve",
        "requestBody": {"required": True, "content": _json("RetrieveRequest")},
        "responses": {"200": found, **errors},
    }


def _json(model: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": TEMPLATE.format(model=model)}}}


def _add_limits(properties: dict[str, Any], config: ServiceConfig) -> None:
    """State what this server allows."""
    properties["queries"]["maxItems"] = config.max_queries
    properties["queries"]["items"]["maxLength"] = config.max_query_chars
    properties["topk"]["anyOf"][0]["maximum"] = config.max_topk
