"""Show runs in a browser: curves, options, trajectories by token; docs/guides/watching.md."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from search_r1.options import Bounds, Port, run


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Which runs the page shows, and where it is served or written."""

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
    """accepted names in a request's Host, besides IP addresses and localhost (*: any)"""
    index_dir: Path = Path("~/.cache/search-r1/view")
    """folder of the trajectory indexes; it may be deleted"""
    export: Path | None = None
    """write one HTML file that opens without a server, and exit"""
    report: bool = False
    """write report.html and report.md into the folder of each run, as a run does at its end"""
    export_trajectories: Annotated[int, Bounds(0, 20_000)] = 200
    """maximum number of trajectories of each run in the exported file, spread over its steps"""


main = partial(run, "search_r1.view.running:start", ViewOptions, prog="search-r1 view",
               description=__doc__)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
