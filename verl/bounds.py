"""Bounds of numeric options. Imports nothing else of `verl`, since servers use them too."""

from dataclasses import dataclass

MAX_NUMBER = 2**31 - 1
"""Default limit of a number's absolute value, which everything that receives it can hold."""
MAX_SEED = 2**32 - 1
"""The largest seed that all random number generators accept."""


@dataclass(frozen=True)
class Bounds:
    """A range of numbers: at least `ge`, at most `le`, more than `gt`, less than `lt`."""

    ge: float = -MAX_NUMBER
    le: float = MAX_NUMBER
    gt: float = -MAX_NUMBER - 1
    lt: float = 2**63

    def __contains__(self, number: float) -> bool:
        return self.ge <= number <= self.le and self.gt < number < self.lt  # false for NaN

    def __str__(self) -> str:
        """Describe the bounds that the field states, without the defaults."""
        if FINITE.ge != self.ge and FINITE.le != self.le:
            return f"from {self.ge} to {self.le}"
        descriptions = {
            f"{self.ge} or more": self.ge != FINITE.ge,
            f"more than {self.gt}": self.gt != FINITE.gt,
            f"at most {self.le}": self.le != FINITE.le,
            f"less than {self.lt}": self.lt != FINITE.lt,
        }
        return ", ".join(text for text, is_stated in descriptions.items() if is_stated)

    def expected(self, number: float) -> str:
        """Describe the bounds for an error about `number`; defaults only if it exceeds them."""
        has_upper_bound = self.le != MAX_NUMBER or self.lt <= MAX_NUMBER
        if has_upper_bound or abs(number) <= MAX_NUMBER:
            return str(self)
        return ", ".join(filter(None, [str(self), f"a finite number of at most {MAX_NUMBER}"]))


FINITE = Bounds()
"""Bounds of a number whose field states none."""
