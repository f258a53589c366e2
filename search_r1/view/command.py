"""See runs in the browser: curves, configuration, and every trajectory by token; docs/view.md."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from search_r1.options import Bounds, Port, run


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Runs behind a page."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs (trainer.default_local_dir), training or finished; several are overlaid"""
    rollouts: Path | None = None
    """the first run's training trajectories, where its trainer.rollout_data_dir has moved"""
    host: str = "127.0.0.1"
    """address to listen on; any but this machine's own wants a token in VIEW_TOKEN"""
    port: Port = 8002
    """port to listen on; 0 for any free one"""
    port_file: Path | None = None
    """write the port here once it is served"""
    allowed_hosts: tuple[str, ...] = ()
    """names in a request's Host, beside addresses and localhost (*: any)"""
    index_dir: Path = Path("~/.cache/search-r1/view")
    """folder of the indexes over trajectories; they may be deleted"""
    export: Path | None = None
    """write one HTML file that opens without a server, and end"""
    report: bool = False
    """write report.html and report.md into the folder of each run, as a run does at its end"""
    export_trajectories: Annotated[int, Bounds(0, 20_000)] = 200
    """most trajectories of each run in that file, spread over its steps"""


main = partial(run, "search_r1.view.running:start", ViewOptions, prog="search-r1 view",
               description=__doc__)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
