"""The storage backend in the real SGLang, on CPU tensors; ``make test-sglang`` runs this in an environment of its own."""
