"""A tier in a few lines: every chunk is a file, in a folder per namespace, which several engines may share."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cargohold.errors import TierError
from cargohold.tiers import Opening, StoreOutcome, Tier, TierConfig
from cargohold.tiers.chunk_format import ChunkCodec
from cargohold.tiers.stores.base import SharedTier


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderConfig(TierConfig):
    """What users give: where."""

    kind = "folder"
    path: str

    def open(self, opening: Opening) -> Tier:
        return Folder(Path(self.path) / opening.codec.namespace.id, opening.codec, opening.chunk_bytes)


class Folder(SharedTier):
    """A store of values: headers, checks and encryption come with ``SharedTier``."""

    def __init__(self, folder: Path, codec: ChunkCodec, chunk_bytes: int) -> None:
        super().__init__(codec, chunk_bytes)
        self.name, self._folder = FolderConfig.kind, folder

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        return [(self._folder / key.hex()).exists() for key in keys]

    def remove(self, keys: Sequence[bytes]) -> None:
        with self._errors():
            for key in keys:
                (self._folder / key.hex()).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is open between calls."""

    def _put(self, key: bytes, value: memoryview) -> StoreOutcome:
        with self._errors():
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = self._folder / f"{os.getpid()}-{threading.get_ident()}"
            unfinished.write_bytes(value)
            unfinished.rename(self._folder / key.hex())
        return StoreOutcome.STORED

    def _get(self, key: bytes) -> memoryview | None:
        with self._errors():
            try:
                return memoryview((self._folder / key.hex()).read_bytes())
            except FileNotFoundError:
                return None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TierError(self.name, str(error)) from error
