"""Web search services as retriever backends, with one adapter for each service."""
