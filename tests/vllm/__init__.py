"""The connectors inside vLLM. Needs vLLM, which has an environment of its own: ``make test-vllm``."""
