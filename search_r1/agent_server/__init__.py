"""The agent as a service: OpenAI's chat completions over HTTP, with searches beside the answer."""
