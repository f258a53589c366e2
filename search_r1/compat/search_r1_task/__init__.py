"""The id of our search task in verifiers: `vf-eval search_r1_task`."""

import importlib

_task = importlib.import_module("search_r1.environments.verifiers_task")  # which may be deleted
SearchHarness, SearchTaskset = _task.SearchHarness, _task.SearchTaskset

__all__ = ["SearchHarness", "SearchTaskset"]
