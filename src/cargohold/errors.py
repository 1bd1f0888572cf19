"""Every error that Cargohold raises on purpose, and a log for warnings whose number others decide.

::

    CargoholdError
    ├── ConfigError              an option is impossible: names the key, the value and what would work
    ├── ModelError               a model cannot be served
    │   ├── ModelNotFoundError     nothing is there under that name
    │   └── UnsupportedModelError  it is there, but has something the engine cannot run
    ├── RequestError             one request cannot be served; the engine is unharmed
    │   └── PromptTooLongError     its prompt has more tokens than fit
    ├── BlockError               a block pool was asked for something that breaks its rules
    │   ├── NullBlockError         the null block was touched, freed or cached
    │   ├── BlockNotHeldError      a reference was given back that is not held
    │   └── OutOfBlocksError       more blocks were asked for than are free
    ├── ContractError            a connector broke a rule of the contract
    ├── LifecycleError           a chunk or job was asked for a move that its state does not allow
    ├── MissingChunkError        a load was planned for a chunk that is not there
    ├── TierError                the medium below host memory fails, or cannot be reached
    ├── TraceError               a file of recorded traffic cannot be read: names the file and the line
    └── EngineDeadError          the engine stopped and cannot go on; carries the cause

Facts are fields, so that a program can act on them; the message says what is wrong and what would work. ``ConfigError`` and
``RequestError`` are also ``ValueError``: they mean that an argument was wrong.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

HIDDEN_OPTION: Final = r"([?&](?:\w*(?:username|password)|sig)=)"
"""Pattern of URL query options that hold secrets: user names and passwords, which clients of Redis also take there (the
password of a TLS key among them), and the signatures of Azure."""
_USER: Final = re.compile(r"(://)\S*@")
_SECRET: Final = re.compile(HIDDEN_OPTION + r"[^&#\s'\"]*")


class CargoholdError(Exception):
    """Root of the tree; catching it catches everything Cargohold raises on purpose. Can be sent between processes."""

    def __reduce__(self) -> tuple[object, ...]:
        # By default, unpickling calls the class with the message alone, but these classes take other arguments.
        return _revived, (type(self), self.args, self.__dict__)


def _revived(kind: type[CargoholdError], args: tuple[object, ...], facts: dict[str, object]) -> CargoholdError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(facts)
    return error


class ConfigError(CargoholdError, ValueError):
    """An option that cannot work, found before anything heavy is started. The message shows no password of a URL.

    Attributes:
        key: name of the option as the user wrote it.
        value: what was given.
        expected: what would be accepted, as a phrase.
    """

    def __init__(self, key: str, value: object, expected: str) -> None:
        super().__init__(f"{key}={without_passwords(repr(value))} is not possible: {expected}")
        self.key = key
        self.value = value
        self.expected = expected


@contextmanager
def option_path(path: str) -> Iterator[None]:
    """Inside the ``with`` block, put ``path`` in front of the option that a ``ConfigError`` names: ``tiers[0].directory``."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}{error.key}", error.value, error.expected) from error.__cause__


class ModelError(CargoholdError):
    """A model cannot be served.

    Attributes:
        model: the name or path as the user wrote it.
        reason: what is wrong and what would work.
    """

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model {model!r}: {reason}")
        self.model = model
        self.reason = reason


class ModelNotFoundError(ModelError):
    """Nothing is there under that name, or what is there is not a model."""


class UnsupportedModelError(ModelError):
    """The model is there, but has something that the engine cannot run."""


class RequestError(CargoholdError, ValueError):
    """One request cannot be served; others and the engine are unharmed.

    Attributes:
        reason: what is wrong and what would work.
        request_id: the request, or ``None`` before it has an id.
    """

    def __init__(self, reason: str, request_id: str | None = None) -> None:
        super().__init__(reason if request_id is None else f"request {request_id}: {reason}")
        self.reason = reason
        self.request_id = request_id


class PromptTooLongError(RequestError):
    """A prompt has more tokens than fit.

    Attributes:
        num_tokens: how many it has, or, if they were not counted, at least has.
        most: how many may be.
        is_counted: whether they were counted; a text that is far too long is not tokenized.
    """

    def __init__(
        self, num_tokens: int, most: int, request_id: str | None = None, *, limit: str = "", is_counted: bool = True
    ) -> None:
        number = f"{num_tokens} tokens" if is_counted else f"at least {num_tokens} tokens"
        super().__init__(f"the prompt has {number}; with one token to generate, at most {most} fit{limit}", request_id)
        self.num_tokens = num_tokens
        self.most = most
        self.is_counted = is_counted


class BlockError(CargoholdError):
    """A block pool was asked for something that breaks its rules; the pool is unchanged."""


class NullBlockError(BlockError):
    """The null block was touched, freed, cached or locked."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"cannot {operation} the null block: it stands for a position whose KV is not kept")
        self.operation = operation


class BlockNotHeldError(BlockError):
    """A reference was given back that its giver does not hold.

    Attributes:
        block_id: the first offending block.
        held: references the giver holds.
        given_back: references it tried to give back.
    """

    def __init__(self, block_id: int, held: int, given_back: int) -> None:
        super().__init__(
            f"block {block_id}: references given back: {given_back}, but only {held} held; nothing was changed"
        )
        self.block_id = block_id
        self.held = held
        self.given_back = given_back


class OutOfBlocksError(BlockError):
    """More blocks were asked for than are free."""

    def __init__(self, requested: int, free: int) -> None:
        super().__init__(f"blocks requested: {requested}, free: {free}")
        self.requested = requested
        self.free = free


class ContractError(CargoholdError):
    """A connector broke a rule of the contract.

    Attributes:
        connector: name of the connector.
        rule: the rule, as a sentence.
    """

    def __init__(self, connector: str, rule: str) -> None:
        super().__init__(f"connector {connector}: {rule}")
        self.connector = connector
        self.rule = rule


class LifecycleError(CargoholdError):
    """A move that the state does not allow: a bug of ours. Nothing was changed.

    Attributes:
        subject: what was asked to move.
        state: the state it is in.
        move: the move that was asked for.
        history: the moves that led here, oldest first.
    """

    def __init__(self, subject: str, state: str, move: str, history: Iterable[str] = ()) -> None:
        self.subject = subject
        self.state = state
        self.move = move
        self.history = tuple(history)
        path = " -> ".join(self.history) or "no earlier moves known"
        super().__init__(f"{subject} is {state}: cannot {move} ({path})")


class MissingChunkError(CargoholdError):
    """A load was planned for a chunk that is not ready in the tier.

    Attributes:
        key: the offload key.
    """

    def __init__(self, key: bytes) -> None:
        super().__init__(f"chunk {key.hex()} is not ready to be loaded")
        self.key = key


class TraceError(CargoholdError):
    """A file of recorded traffic cannot be read.

    Attributes:
        file: as the user wrote it.
        line: number of the line, from 1; ``None`` if it is not about a line.
        reason: what is wrong with it.
    """

    def __init__(self, file: str, line: int | None, reason: str) -> None:
        where = file if line is None else f"{file}, line {line}"
        super().__init__(f"{where}: {reason}")
        self.file = file
        self.line = line
        self.reason = reason


class TierError(CargoholdError):
    """A medium below host memory failed, or cannot be reached; what was asked of it is a miss. It may come back.

    Attributes:
        tier: what users call the tier.
        reason: what went wrong.
    """

    def __init__(self, tier: str, reason: str) -> None:
        super().__init__(f"tier {tier}: {reason}")
        self.tier = tier
        self.reason = reason


class EngineDeadError(CargoholdError):
    """The engine stopped and cannot go on; ``__cause__`` is what stopped it."""


def without_passwords(text: str) -> str:
    """The text, with the users, passwords and signatures of the URLs in it removed or replaced by ``***``."""
    return _SECRET.sub(r"\1***", _USER.sub(r"\1", text))


def one_line(error: BaseException, max_chars: int = 240) -> str:
    """The message of any exception, in one line of at most ``max_chars``; the name of its type if the message is empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


NUM_TOLD: Final = 8


class SparingLog:
    """Logs each of the first ``NUM_TOLD`` warnings, and then only those whose number is a power of two. Thread-safe.

    Args:
        logger: where to.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._count = 0

    def warning(self, message: str, *args: object) -> None:
        """Count a warning, and log it if it is due. The arguments are those of ``Logger.warning``."""
        with self._lock:
            self._count += 1
            count = self._count
        if count < NUM_TOLD:
            self._logger.warning(message, *args, stacklevel=2)
        elif count.bit_count() == 1:
            self._logger.warning(
                f"{message} (warning %d of this kind; the next one logged is number %d)",
                *args,
                count,
                2 * count,
                stacklevel=2,
            )
