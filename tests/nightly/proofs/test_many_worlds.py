"""The bound on staleness in many more random worlds than `make test` tries."""

import pytest

from tests.verl.ext.test_staleness import assert_bounded

pytestmark = pytest.mark.asynchrony


@pytest.mark.parametrize("staleness", range(5))
def test_no_token_is_older_than_max_staleness(staleness: int) -> None:
    """In 2,000 worlds, of which `make test` tries 200."""
    assert_bounded(staleness, range(400))
