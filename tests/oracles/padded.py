"""Random padded batches, and the file that a recorder writes. Imports none of our packages.

The recorders run in a separate environment, in which `verl` is the other library; they find this
module because it is in their folder.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Policy tokens are 1; observations and padding 0. Rows have different lengths.
DIALOGUES = (
    (1, 1, 0, 0, 1, 1, 1, 0),
    (1, 1, 1, 1, 1, 1, 1, 1),
    (0, 1, 0, 0, 0, 0, 0, 0),
    (1, 1, 1, 0, 0, 0, 1, 0),
    (1, 0, 1, 0, 1, 0, 0, 0),
    (1, 1, 1, 1, 0, 0, 0, 0),
)
FAILED = (
    (1, 1, 0, 1, 1, 0),
    (0, 0, 0, 0, 0, 0),  # the failed trajectory
    (1, 1, 1, 1, 1, 1),
    (0, 1, 1, 0, 0, 0),
    (1, 0, 0, 1, 1, 0),
)


@dataclass(frozen=True)
class Padded:
    """Columns of a batch, (batch, response) each, and the group of each row."""

    name: str
    mask: Tensor
    index: Sequence[int]
    columns: dict[str, Tensor]

    def __getitem__(self, column: str) -> Tensor:
        return self.columns[column].clone()

    @property
    def group(self) -> np.ndarray:
        return np.array(self.index)

    def without(self, row: int, name: str) -> "Padded":
        """Return the batch without a row."""
        kept = [i for i in range(len(self.index)) if i != row]
        columns = {word: x[kept] for word, x in self.columns.items()}
        return Padded(name, self.mask[kept], [self.index[i] for i in kept], columns)


def random_batch(
    name: str,
    rows: Sequence[Sequence[int]],
    index: Sequence[int],
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Padded:
    """Make a batch with random values at all tokens; rewards are 0 off the policy."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor(rows, dtype=dtype)

    def normal(scale: float = 1.0) -> Tensor:
        # Rounded, to keep the table small.
        numbers = scale * torch.randn(mask.shape, generator=generator).double()
        return numbers.round(decimals=4).to(dtype)

    old = -normal().abs() - 0.05
    last = mask.cumsum(-1).eq(mask.sum(-1, keepdim=True)) & mask.bool()
    columns = {
        "rewards": (normal(0.05) + last * normal()) * mask,
        "values": normal(),
        "old_log_probs": old,
        "log_probs": old + normal(0.6),
        "ref_log_probs": old + normal(0.6),
        "rollout_log_probs": old + normal(0.5),
        "advantages": normal(),
        "returns": normal(),
        "old_values": normal(),
    }
    return Padded(name, mask, index, columns)


def figures(x: Any) -> Any:
    """Convert a tensor to nested lists of the shortest exact decimals; return others unchanged."""
    if not isinstance(x, Tensor):
        return x
    if x.ndim:
        return [figures(row) for row in x.detach()]
    return float(str(x.numpy()[()]))


@dataclass
class Table:
    """Results of one version of a library."""

    library: str
    version: str
    batches: list[Padded]
    cases: list[dict[str, Any]] = field(default_factory=list)

    def add(self, quantity: str, batch: str, settings: dict[str, Any], **outputs: Any) -> None:
        """Add the results of a call of the library."""
        results = {name: figures(x) for name, x in outputs.items()}
        self.cases.append(
            {"quantity": quantity, "batch": batch, "settings": settings, "outputs": results}
        )

    def write(self, folder: Path) -> Path:
        """Write LIBRARY_VERSION.json, with one case per line."""
        batches = {
            b.name: {
                "dtype": str(b.mask.dtype).removeprefix("torch."),
                "mask": b.mask.int().tolist(),
                "index": list(b.index),
                **{name: figures(x) for name, x in b.columns.items()},
            }
            for b in self.batches
        }
        head = {"library": self.library, "version": self.version, "torch": torch.__version__}
        lines = [f'{json.dumps(k)}: {json.dumps(v, separators=(",", ":"))}' for k, v in
                 {**head, "batches": batches}.items()]  # fmt: skip
        cases = ",\n".join(json.dumps(case, separators=(",", ":")) for case in self.cases)
        path = folder / f"{self.library}_{self.version}.json"
        path.write_text("{" + ",\n".join(lines) + ',\n"cases": [\n' + cases + "\n]}\n")
        return path
