"""The models of torch's allocator, against cases that are computed by hand."""

from benchmarks.fragmentation import (
    MIB,
    CachingAllocator,
    ExpandableAllocator,
    fits,
    least_memory,
    peak_bytes,
)


def test_segments_are_split_merged_and_given_back() -> None:
    """Requests of 8 MiB share segments of 20; one of 30 gets its own, once a free one is gone."""
    allocator = CachingAllocator(50 * MIB)
    first, second = allocator.allocate(8 * MIB), allocator.allocate(8 * MIB)
    assert allocator.reserved == 20 * MIB
    third = allocator.allocate(8 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(17 * MIB).size == 17 * MIB, "two free neighbours are one block"
    assert allocator.reserved == 40 * MIB
    allocator.free(third)
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 50 * MIB, "the segment of the third was given back"


def test_a_gap_that_no_tensor_fits_is_only_a_loss_in_usual_segments() -> None:
    """60 and 60 MiB are freed around 20 that stay; 80 at once fit only where pages are unmapped."""
    events = [(0, 60 * MIB), (1, 20 * MIB), (2, 60 * MIB), (0, 0), (3, 40 * MIB), (2, 0),
              (4, 80 * MIB)]  # fmt: skip
    assert peak_bytes(events) == 140 * MIB
    assert fits(events, ExpandableAllocator(160 * MIB))
    assert not fits(events, CachingAllocator(158 * MIB))
    assert least_memory(events, ExpandableAllocator) < least_memory(events, CachingAllocator)
