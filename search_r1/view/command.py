"""Show runs in a browser: curves, trajectories token by token; docs/guides/watching.md."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from search_r1.options import Port, run


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Which runs the page shows, and where it is served."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs (trainer.default_local_dir), training or finished; several are overlaid"""
    rollouts: Path | None = None
    """the first run's training trajectories, if its trainer.rollout_data_dir has moved"""
    host: str = "127.0.0.1"
    """address to listen on; any other than this machine's requires a token in VIEW_TOKEN"""
    port: Port = 8002
    """port to listen on; 0: any free port"""
    port_file: Path | None = None
    """file to write the port to once the server listens"""
    allowed_hosts: tuple[str, ...] = ()
    """accepted names in a request's Host, besides localhost and the bound address (*: any)"""
    index_dir: Path = Path("~/.cache/search-r1/view")
    """folder of the trajectory indexes; it may be deleted"""


SINCE = "is gone since 2026-11-28"
FALLEN_FLAGS = {
    "--export": f"the page as one file {SINCE}; serve the page, and forward its port with ssh -L",
    "--export-trajectories": f"the page as one file {SINCE}; leave the flag out",
    "--report": f"the report of a run {SINCE}; look at its curves, and compare models with "
    "search-r1 evaluate",
}
main = partial(run, "search_r1.view.running:start", ViewOptions, prog="search-r1 view",
               description=__doc__, fallen=FALLEN_FLAGS)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
