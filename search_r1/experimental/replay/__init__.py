"""`search-r1 replay`: replay recorded trajectories, unchanged or edited; docs/view.md."""
