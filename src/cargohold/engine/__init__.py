"""The embedded engine: small and complete, for any Hugging Face model whose kind of attention it supports."""
