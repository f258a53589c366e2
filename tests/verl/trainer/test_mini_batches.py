"""How a batch is divided into mini-batches with `trainer.keep_groups`."""

import torch

from tests.verl.trainer.test_learning import small
from verl.config import Config
from verl.trainer.learning import mini_batches


def test_mini_batches_can_keep_groups_together() -> None:
    """Every sequence once per epoch, groups in random order, at most two groups cut per batch."""
    batch, config = small([0.0] * 30), Config()
    batch.columns["group"] = [f"g{i // 5}" for i in range(30)]
    batch.tokens["position"] = torch.arange(batch.num_tokens)
    config.trainer.keep_groups = True
    minis = mini_batches(batch, config, 8, 2, step=3)
    drawn = [int(m.tokens["position"][start]) for m in minis for start in m.offsets[:-1]]
    starts = batch.offsets[:-1].tolist()
    orders = [[starts.index(p) for p in epoch] for epoch in (drawn[:30], drawn[30:])]
    for order in orders:
        assert sorted(order) == list(range(30))
        assert all(order[k : k + 5] == [*range(order[k], order[k] + 5)] for k in range(0, 30, 5))
    assert orders[0] != orders[1]
    assert [len(mini) for mini in minis] == [8, 8, 8, 6] * 2
    sizes = [[mini.columns["group"].count(g) for g in set(mini.columns["group"])] for mini in minis]
    assert max(sum(size < 5 for size in some) for some in sizes) <= 2
