"""Estimates and shortages in words: amounts in GB (10⁹ bytes) or MB, the largest first."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from verl.config import Config
from verl.machine import Machine
from verl.preflight.memory.estimate import Estimate
from verl.preflight.memory.fitting import Change, Shortage
from verl.preflight.memory.needs import Need, Place
from verl.preflight.memory.offload import OPTIONS, open_choices

GB, MB = 1e9, 1e6
PLACES = {Place.DEVICE: "each GPU", Place.HOST: "host", Place.SHARED: "/dev/shm"}
"""What the places are called."""


def amount(count: float) -> str:
    """Bytes as one reads them: 512 MB, 1.5 GB, 61.3 GB."""
    if count < GB / 10:
        return f"{count / MB:.3g} MB"
    return f"{count / GB:.3g} GB" if count < 10 * GB else f"{count / GB:.1f} GB"


def table(found: Estimate, machine: Machine) -> str:
    """A line per need in the worst phase of each place, and a line that adds them up.

    What is in brackets is held only where there is room, and is not added up.
    """
    free = {Place.HOST: machine.host.free, Place.SHARED: machine.shared_free}
    if machine.devices:
        free[Place.DEVICE] = min(device.free for device in machine.devices)
    lines: list[str] = []
    for place, name in PLACES.items():
        phase = found.peak(place)
        needs = [*found.at(place, phase), *optional(found, place)]
        if not needs:
            continue
        lines += [f"  {name:8} {_bytes(n):>11}  {n.what}" for n in largest(needs)]
        size = free.get(place)
        of = "" if size is None else f" of {amount(size)} free"
        total = amount(found.total(place, phase))
        lines.append(f"  {name:8} {total:>11}  needed{of}, in {phase}")
    if found.engine is not None:
        tokens = f"{found.engine.cached_tokens:,} tokens"
        lines.append(f"  {'each GPU':8} {amount(max(0, found.engine.cache)):>11}  of the engine's"
                     f" share is KV cache, for {tokens}")  # fmt: skip
    return "\n".join(lines)


def optional(found: Estimate, place: Place) -> list[Need]:
    """What would be held there in some phase if there is room."""
    return [need for need in found.needs if need.place is place and need.optional and need.bytes]


def _bytes(need: Need) -> str:
    return f"({amount(need.bytes)})" if need.optional else amount(need.bytes)


def largest(needs: Sequence[Need]) -> list[Need]:
    """By falling size."""
    return sorted(needs, key=lambda need: -need.bytes)


def shortage_line(short: Shortage, found: Estimate) -> str:
    """What is too small, by how much, and what needs it."""
    phase = found.peak(short.place)
    parts = ", ".join(
        f"{n.what} {amount(n.bytes)}" for n in largest(found.at(short.place, phase))[:5]
    )
    needs = f"{PLACES[short.place]} needs about {amount(short.needed)}"
    if short.what != phase.value:
        return f"{needs} for {short.what}, but the engine's share is {amount(short.free)}"
    return f"{needs} in {short.what} ({parts}), but {amount(short.free)} is free"


def proposal_line(change: Change, found: Estimate) -> str:
    """Options as one types them, and what the run then needs."""
    words = {True: "true", False: "false"}
    options = [f"{key}={words.get(value, value)}" if isinstance(value, bool) else f"{key}={value}"
               for key, value in change.items()]  # fmt: skip
    places = [place for place in (Place.DEVICE, Place.HOST) if found.most(place)]
    sums = " and ".join(f"{amount(found.most(place))} of {PLACES[place]}" for place in places)
    return f"{' '.join(options)}: needs {sums}"


def offload_words(config: Config, chosen: Config) -> str:
    """What waits on the host in `chosen`, of that which `config` leaves open."""
    parts = [OPTIONS[key] for key in open_choices(config) if attrgetter(key)(chosen)]
    return f"offload to the host: {', '.join(parts) or 'nothing'}"


def offload_line(
    config: Config, chosen: Config, without: Estimate, found: Estimate, machine: Machine
) -> str:
    """What waits there, what each GPU needs with that, and what it would need without."""
    words = offload_words(config, chosen)
    needed, otherwise = found.most(Place.DEVICE), without.most(Place.DEVICE)
    free = amount(min(device.free for device in machine.devices))
    line = f"{words}; each GPU needs {amount(needed)} of {free} free"
    return line if needed == otherwise else f"{line}, and would need {amount(otherwise)} otherwise"
