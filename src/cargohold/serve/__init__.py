"""The HTTP server: the interfaces of OpenAI and Anthropic on one model, what its cache does, and a page that shows it."""
