"""The example, built once for all tests of this folder."""

import pytest

from example.build import Example, build_example


@pytest.fixture(scope="session")
def example() -> Example:
    """The example of seed 0, in memory."""
    return build_example()
