"""Reading of recorded tables; converts padded batches to jagged ones for our functions."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.core_algos.advantages import AdvantageInputs, Gae
from verl.core_algos.jagged import sequence_ids

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class RecordedBatch:
    """A padded batch; converted to a jagged one, a row ends at its last policy token."""

    name: str
    figures: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.figures["dtype"])

    @property
    def index(self) -> list[int]:
        return self.figures["index"]

    @cached_property
    def mask(self) -> Tensor:
        """Policy tokens, (batch, response) bool."""
        return torch.tensor(self.figures["mask"]).bool()

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each row that are kept; two for a row without policy tokens."""
        last = (self.mask.long().cumsum(1).argmax(1) + 1) * self.mask.any(1)
        return torch.where(self.mask.any(1), last, 2)

    @cached_property
    def kept(self) -> Tensor:
        """(batch, response) bool: all but padding; observations inside a row are kept."""
        return torch.arange(self.mask.shape[1]) < self.lengths[:, None]

    @property
    def offsets(self) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    @property
    def policy_mask(self) -> Tensor:
        """(num_tokens,) bool."""
        return self.mask[self.kept]

    @property
    def sequence_ids(self) -> Tensor:
        """The sequence of each policy token, as a loss reads it."""
        return sequence_ids(self.offsets)[self.policy_mask]

    def padded(self, column: str) -> Tensor:
        return torch.tensor(self.figures[column], dtype=self.dtype)

    def __getitem__(self, column: str) -> Tensor:
        """Return a column, (num_tokens,)."""
        return self.padded(column)[self.kept]

    def on_policy(self, column: str) -> Tensor:
        """Return a column at the policy tokens."""
        return self.padded(column)[self.mask]

    def inputs(
        self, lam: float = 1.0, mask: Tensor | None = None, **options: Any
    ) -> AdvantageInputs:
        """Return the inputs of an estimator; GAE runs over `mask` and is whitened over it."""
        return AdvantageInputs(
            self["rewards"], self.policy_mask, self.offsets, values=self["values"],
            group_ids=self.index, gae=Gae(lam, mask, mask), **options,
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A call of the library: its batch, other arguments, and results."""

    quantity: str
    batch: RecordedBatch
    settings: dict[str, Any]
    outputs: dict[str, Any]

    @property
    def id(self) -> str:
        options = [str(v) for v in self.settings.values() if not isinstance(v, list) or len(v) < 4]
        return "-".join([self.quantity, self.batch.name, *options])

    def padded(self, output: str) -> Tensor:
        """Return an output, (batch, response)."""
        return torch.tensor(self.outputs[output], dtype=self.batch.dtype)

    def on_policy(self, output: str) -> Tensor:
        """Return an output at the policy tokens."""
        return self.padded(output)[self.batch.mask]


@dataclass(frozen=True)
class RecordedTable:
    """All recorded results of a library."""

    figures: dict[str, Any]

    @classmethod
    def read(cls, library: str) -> "RecordedTable":
        """Read the only table of a library; its version is in the file's name."""
        (path,) = FOLDER.glob(f"{library}_*.json")
        return cls(json.loads(path.read_text()))

    @cached_property
    def batches(self) -> dict[str, RecordedBatch]:
        figures = self.figures["batches"].items()
        return {"": RecordedBatch("", {"dtype": "float64"})} | {
            name: RecordedBatch(name, values) for name, values in figures
        }

    @cached_property
    def all(self) -> list[Case]:
        return [
            Case(c["quantity"], self.batches[c["batch"]], c["settings"], c["outputs"])
            for c in self.figures["cases"]
        ]

    def cases(self, *quantities: str, batches: str = "", **settings: Any) -> list[Case]:
        """Return the cases with these quantities, batches (names separated by spaces), settings."""
        cases = [
            case
            for case in self.all
            if case.quantity in quantities
            and (not batches or case.batch.name in batches.split())
            and all(case.settings.get(name) == x for name, x in settings.items())
        ]
        assert cases, f"the table has no {quantities} {batches} {settings}"
        return cases

    def case(self, quantity: str, batch: str = "", **settings: Any) -> Case:
        """Return the first of the `cases`."""
        return self.cases(quantity, batches=batch, **settings)[0]
