"""`search-r1 replay`: replays trajectories, unchanged or edited; docs/guides/watching.md."""
