"""What a number of a command line may be; every number is finite, whether or not its field says so.

Nothing is imported here: servers, whose options are bounded too, need no trainer.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_NUMBER = 2**31 - 1
"""What a number may be where its field says no more: all that it is given to can hold that."""
MAX_SEED = 2**32 - 1
"""The largest seed that every generator of random numbers takes."""


@dataclass(frozen=True)
class Bounds:
    """Within `ge` and `le`, more than `gt`, less than `lt`."""

    ge: float = -MAX_NUMBER
    le: float = MAX_NUMBER
    gt: float = -MAX_NUMBER - 1
    lt: float = 2**63

    def __contains__(self, number: float) -> bool:
        return self.ge <= number <= self.le and self.gt < number < self.lt  # false for NaN

    def __str__(self) -> str:
        """The bounds that a field states itself."""
        if FINITE.ge != self.ge and FINITE.le != self.le:
            return f"from {self.ge} to {self.le}"
        words = {
            f"{self.ge} or more": self.ge != FINITE.ge,
            f"more than {self.gt}": self.gt != FINITE.gt,
            f"at most {self.le}": self.le != FINITE.le,
            f"less than {self.lt}": self.lt != FINITE.lt,
        }
        return ", ".join(word for word, is_stated in words.items() if is_stated)

    def expected(self, number: float) -> str:
        """The bounds in words, for one who gave `number`."""
        has_end = self.le != MAX_NUMBER or self.lt <= MAX_NUMBER
        if has_end or abs(number) <= MAX_NUMBER:
            return str(self)
        return ", ".join(filter(None, [str(self), f"a finite number of at most {MAX_NUMBER}"]))


FINITE = Bounds()
"""Those of a number whose field states none."""
