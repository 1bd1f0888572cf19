"""The interfaces of OpenAI and Anthropic: what their clients send, and what they expect back."""
