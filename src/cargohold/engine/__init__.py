"""The embedded engine: small and complete, for any Hugging Face model with attention we know."""
