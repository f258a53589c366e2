"""An OpenAI-compatible HTTP server for the search agent, with a chat page."""
