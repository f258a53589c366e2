"""The single controller: one driver process sends batches to Ray actors and joins their results."""
