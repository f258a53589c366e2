"""Settings of torch's CUDA caching allocator, by which ranks and engines differ.

Micro-batches of other lengths leave gaps between tensors, for which the usual segments of a rank
need up to 29 % more memory than the tensors (`benchmarks/fragmentation.py`). Expandable segments
map and unmap pages instead. They exclude CUDA IPC between processes that may not read each other's
handles, and some versions of vLLM refuse to sleep with them.
"""

from collections.abc import Mapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The allocator's variable, by its new name and by the one that older torch reads."""
EXPANDABLE = "expandable_segments"


def is_expandable(environment: Mapping[str, str], shares_memory: bool) -> bool:
    """Whether ranks allocate expandable segments; not if their transport shares their memory."""
    chosen = ",".join(environment.get(name, "") for name in VARIABLES)
    return f"{EXPANDABLE}:True" in chosen or (not chosen.strip(",") and not shares_memory)


def rank_variables(environment: Mapping[str, str], shares_memory: bool) -> dict[str, str]:
    """Return the allocator's variables of ranks on GPUs; the user's own setting prevails."""
    own = {name: environment[name] for name in VARIABLES if environment.get(name)}
    if own or not is_expandable(environment, shares_memory):
        return own
    return {VARIABLES[1]: f"{EXPANDABLE}:True"}


def engine_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the allocator's variables of engines: the user's, without expandable segments.

    vLLM's sleep mode takes memory by a pool of its own, which some versions refuse to combine.
    """
    return {
        name: ",".join(entry for entry in environment[name].split(",") if EXPANDABLE not in entry)
        for name in VARIABLES
        if environment.get(name)
    }
