"""Groups of sequences with the same prompt, and sums, means and deviations within them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.core_algos.jagged import has_policy_token


def dense_group_ids(group_ids: Sequence[Hashable] | Tensor, device: torch.device) -> Tensor:
    """Number groups 0, 1, … in order of first appearance, (num_seqs,) int64."""
    # Ids are compared by equality, so that ("nq", 3) and ("hotpotqa", 3) differ.
    keys = group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids
    numbers: dict[Hashable, int] = {}
    dense = [numbers.setdefault(key, len(numbers)) for key in keys]
    return torch.tensor(dense, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Groups:
    """Groups of sequences with the same prompt; those without policy tokens do not count."""

    ids: Tensor
    """Dense group numbers, (num_seqs,) int64."""
    members: Tensor
    """(num_seqs,) bool: the sequences with policy tokens."""

    @classmethod
    def of(
        cls, group_ids: Sequence[Hashable] | Tensor, policy_mask: Tensor, offsets: Tensor
    ) -> "Groups":
        """Build the groups of a batch; raises ValueError unless there is one id per sequence."""
        num_seqs = offsets.numel() - 1
        if len(group_ids) != num_seqs:
            raise ValueError(
                f"got {len(group_ids)} group ids for {num_seqs} sequences; give one id a sequence"
            )
        ids = dense_group_ids(group_ids, policy_mask.device)
        return cls(ids, has_policy_token(policy_mask, offsets))

    def total(self, x: Tensor) -> Tensor:
        """Return for each sequence the sum of ``x`` over its group's members. Both (num_seqs,)."""
        num_groups = int(self.ids.max()) + 1 if self.ids.numel() else 0
        chosen = self.ids[self.members]
        return x.new_zeros(num_groups).index_add(0, chosen, x[self.members])[self.ids]

    def sizes(self, like: Tensor) -> Tensor:
        """Return the size of each sequence's group, (num_seqs,) of the dtype of ``like``."""
        return self.total(torch.ones_like(like))

    def mean(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return each sequence's (weighted) group mean of ``x``; 0 with fewer than two members."""
        weights = torch.ones_like(x) if weights is None else weights.to(x.dtype)
        means = self.total(x * weights) / self.total(weights).clamp(min=1e-12)
        # As in veRL, a single score minus this mean is unchanged.
        return torch.where(self.sizes(x) > 1, means, 0.0)

    def best_of_others(self, x: Tensor) -> Tensor:
        """Return each sequence's largest ``x`` of the other members (num_seqs,), 0 without one."""
        best = self._largest(x, self.members)
        is_best = self.members & (x == best)
        is_only_best = is_best & (self.total(is_best.to(x.dtype)) == 1)
        best = torch.where(is_only_best, self._largest(x, self.members & ~is_best), best)
        return best.masked_fill(best.isneginf(), 0.0)

    def _largest(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the largest ``x`` where ``mask`` in each sequence's group, -inf without one."""
        num_groups = int(self.ids.max()) + 1 if self.ids.numel() else 0
        largest = x.new_full((num_groups,), -torch.inf)
        return largest.scatter_reduce(0, self.ids[mask], x[mask], "amax")[self.ids]

    def std(self, x: Tensor) -> Tensor:
        """Return each sequence's unbiased group deviation of ``x``; 1 without a second member."""
        sizes = self.sizes(x)
        squares = self.total((x - self.mean(x)).square())
        return torch.where(sizes > 1, (squares / (sizes - 1).clamp(min=1)).sqrt(), 1.0)
