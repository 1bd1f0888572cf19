"""What both scripts ask about."""

DOCUMENT_TOKENS = 400


def document(number: int) -> list[int]:
    """A long prompt as token ids, so that no tokenizer is needed."""
    return [10 + (number * 31 + at * 7) % 90 for at in range(DOCUMENT_TOKENS)]
