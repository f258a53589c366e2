"""The settings of torch's CUDA allocator in ranks and engines."""

import pytest

from verl.training.allocator import engine_variables, is_expandable, rank_variables

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    ("environment", "shares_memory", "expected"),
    [
        ({}, False, {OLD: "expandable_segments:True"}),
        ({}, True, {}),
        ({OLD: ""}, False, {OLD: "expandable_segments:True"}),
        ({NEW: "max_split_size_mb:64"}, False, {NEW: "max_split_size_mb:64"}),
        ({OLD: "expandable_segments:True"}, True, {OLD: "expandable_segments:True"}),
        ({OLD: "expandable_segments:False"}, False, {OLD: "expandable_segments:False"}),
    ],
)
def test_ranks_allocate_expandable_segments_unless_they_share_them(
    environment: dict[str, str], shares_memory: bool, expected: dict[str, str]
) -> None:
    """CUDA IPC excludes them; the user's own setting prevails."""
    assert rank_variables(environment, shares_memory) == expected
    has = "expandable_segments:True" in expected.values()
    assert is_expandable(environment, shares_memory) is has


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        ({OLD: "expandable_segments:True"}, {OLD: ""}),
        ({NEW: "max_split_size_mb:64, expandable_segments:True,a:1"},
         {NEW: "max_split_size_mb:64,a:1"}),
        ({OLD: "max_split_size_mb:64"}, {OLD: "max_split_size_mb:64"}),
    ],
)  # fmt: skip
def test_engines_never_inherit_them(environment: dict[str, str], expected: dict[str, str]) -> None:
    """Their other entries stay. A variable is emptied, since a Ray actor inherits what is unset."""
    assert engine_variables(environment) == expected
