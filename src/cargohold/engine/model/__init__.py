"""A Hugging Face model on paged KV."""
