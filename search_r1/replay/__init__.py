"""`search-r1 replay`: recorded trajectories played again, as they were or edited; docs/view.md."""
