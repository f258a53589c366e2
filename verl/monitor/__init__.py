"""Monitoring of a run: trackers, timings, FLOPs, traces, host memory and the collapse guard."""
