"""The single controller: one driver process that hands batches to Ray actors and joins answers."""
