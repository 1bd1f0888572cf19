"""One worker's shard of a disk tier's directory: opens and scans it, and makes it larger while budget and disk allow."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Final

from cargohold.deadlines import LOCK, MOVE
from cargohold.errors import ConfigError, SparingLog
from cargohold.option_values import format_bytes, format_count
from cargohold.process import allow_open_files, leaves_files
from cargohold.tiers.chunk_format import HEADER_BYTES
from cargohold.tiers.config import Opening
from cargohold.tiers.disk.files import (
    FULL,
    DirectoryLock,
    Geometry,
    Segment,
    brief_lock,
    is_in_use,
    is_of_engine,
    may_hold_chunks,
    segment_files,
    uses_file,
)
from cargohold.tiers.disk.root import (
    DESCRIPTION_FILE,
    bytes_in,
    is_own,
    make_private,
    make_room,
    make_smaller,
    read_description,
    shards_in,
    write_description,
)
from cargohold.tiers.disk.slots import Place, SlotPlan, place_in
from cargohold.tiers.disk.trimming import move_down
from cargohold.tiers.namespace import DESCRIPTION, Namespace
from cargohold.tiers.places import place_of, warn_of_owners, warn_of_writers

logger = logging.getLogger(__name__)

_SEGMENT_BYTES: Final = 256 * 1024**2
_LEAST_SEGMENTS: Final = 16
_USUAL_SEGMENTS: Final = 64
"""Number of segments into which a large budget is cut: half of the maximum, so that the budget can be doubled later."""
_MOST_SEGMENTS: Final = 128
"""Maximum number of segments: each has three open files, and a process may usually have 1024, some for other purposes."""
_FILES_PER_SEGMENT: Final = 3
_OTHER_BYTES: Final = 32 * 1024
"""Part of a shard's budget that is kept for descriptions, locks and directories."""
_GROWTH_PAUSE: Final = 64
"""After a failed attempt to make the files larger, so many calls make none: an attempt looks at all files of the directory."""
_LOCK_POLL_S: Final = 0.05
_RANK: Final = re.compile(r"^rank \d+ ")
"""The worker's rank at the start of a namespace's ``split``. Namespaces that differ only in it are of one engine's workers."""
_USABLE: Final = "it must be a directory where files can be written"
_TOO_MANY_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})


@dataclass(frozen=True, slots=True)
class ShardBudget:
    """The directory of a shard, and the bytes that it may take.

    Attributes:
        root: the directory that the user named; an absolute path.
        root_bytes: maximum size of everything in the directory together.
        shard_bytes: maximum size of this shard.
        reserve_bytes: free space of the file system that is never taken.
    """

    root: Path
    root_bytes: int
    shard_bytes: int
    reserve_bytes: int


class Shard:
    """One worker's files in the directory, locked against other processes.

    Any thread may call any method but ``grow`` and ``close``. Methods raise ``OSError`` where they say so.

    Attributes:
        path: its subdirectory.
        plan: how chunks lie in slots.
        geometry: sizes of its files.
        capacity: maximum number of slots within the budget.

    Args:
        budget: the directory, and the bytes that it may take.
        opening: what this worker keeps there.
        direct_io: whether to bypass the page cache, if the file system allows it.

    Raises:
        ConfigError: the directory cannot be used, or is used by another process, or the budget is impossible.
    """

    def __init__(self, budget: ShardBudget, opening: Opening, *, direct_io: bool) -> None:
        namespace, self._opening = opening.codec.namespace, opening
        self._root = budget.root
        self._budget = budget
        self._direct_io = direct_io
        self.path = self._root / namespace.id
        self.segments: list[Segment] = []
        self._growth_pause = 0
        self._is_hindered = False
        self._shortage = SparingLog(logger)
        try:
            self._lock = self._take_lock()
            try:
                check_budget(self._root, budget)
                self.plan, self.geometry = self._find_plan(namespace)
                self.capacity = self._most_segments() * self.geometry.slots_per_segment
                self._open_segments(namespace)
                if not namespace.encryption:
                    warn_of_owners("disk", (self._root, self.path))
                    warn_of_writers("disk", (self._root, self.path))
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise _unusable(budget.root, error) from error

    @property
    def num_reachable(self) -> int:
        """Maximum number of slots as things are: those that there are, if there could be no more at the last attempt."""
        return self.num_slots if self._is_hindered else self.capacity

    @property
    def num_slots(self) -> int:
        """Number of slots in the segments that there are."""
        return len(self.segments) * self.geometry.slots_per_segment

    def segment_of(self, slot: int) -> tuple[Segment, int]:
        """Return a slot's segment, and the slot's number in it."""
        at, within = divmod(slot, self.geometry.slots_per_segment)
        return self.segments[at], within

    def place_of(self, slots: Sequence[int]) -> Place:
        """Return a chunk's slots in the files."""
        return place_in(self.segments, slots)

    def header_tables(self) -> Iterator[bytes]:
        """Yield, per segment, the headers of its slots.

        Headers that cannot be read count as empty slots: one bad place on the disk must not keep an engine from starting. A
        later write to such a slot wipes its header first.
        """
        for number, segment in enumerate(self.segments):
            try:
                table = segment.read_headers()
            except OSError as error:
                logger.warning(
                    "disk tier: cannot read the headers of %s, so its chunks are lost: %s",
                    self._segment_path(number),
                    error.strerror,
                )
                table = bytes(HEADER_BYTES * self.geometry.slots_per_segment)
            yield table

    def is_deleted(self) -> bool:
        """Whether the directory was deleted or moved away, or the last segment's files deleted. Raises ``OSError``."""
        return self._lock.is_deleted() or any(segment.is_deleted() for segment in self.segments[-1:])

    def grow(self) -> bool:
        """Add a segment; return whether budget, disk and the process's limits allowed it.

        Call from one thread at a time. Raises ``OSError``.
        """
        if self.num_slots >= self.capacity:
            return False
        if self._growth_pause:
            self._growth_pause -= 1
            return False
        is_larger = self._try_to_grow()
        if not is_larger:
            self._growth_pause = _GROWTH_PAUSE
        return is_larger

    def _try_to_grow(self) -> bool:
        obstacle = ""
        try:
            with brief_lock(self._root):
                obstacle = self._make_room()
                if not obstacle:
                    self._add_segment()
        except OSError as error:
            if error.errno in _TOO_MANY_FILES:
                obstacle = f"no more files can be opened: {error.strerror} (see ulimit -n)"
            elif error.errno in FULL:
                obstacle = f"{error.strerror}; {format_bytes(free_bytes(self._root))} are free"
            else:
                raise
        was_hindered, self._is_hindered = self._is_hindered, bool(obstacle)
        if obstacle and not was_hindered:
            per_slot = self.geometry.segment_bytes // self.geometry.slots_per_segment
            sizes = [format_bytes(count * per_slot) for count in (self.num_slots, self.capacity)]
            message = "disk tier in %s: it cannot grow above %s, of its limit of %s, because %s"
            self._shortage.warning(message, self.path, *sizes, obstacle)
        return not obstacle

    def wipe_header(self, slot: int) -> None:
        """Mark a slot as empty on the disk. Raises ``OSError``."""
        segment, at = self.segment_of(slot)
        segment.write_header(at)

    def note_use(self) -> None:
        """Note on the disk that the shard is used now."""
        self._lock.note_use()

    def close(self) -> None:
        """Let other processes use the shard. Its files close when no thread reads them any more."""
        self.segments = []
        self.note_use()
        self._lock.release()

    def _take_lock(self) -> DirectoryLock:
        """Make and lock the shard's folder. Raises ``ConfigError``, or ``OSError``."""
        make_private(self._root)
        for _ in _tries(self._root):
            # Under the lock, so that no process deletes the shard while it is being opened.
            with suppress(BlockingIOError), brief_lock(self._root):
                make_private(self.path)
                if os.path.lexists(self.path / DESCRIPTION):
                    reason = f"a shared store has its chunks there, in {self.path}; give each its own directory"
                    raise ConfigError("directory", str(self._root), reason)
                return DirectoryLock(self.path)
        raise _used(self._root)

    def _find_plan(self, namespace: Namespace) -> tuple[SlotPlan, Geometry]:
        """Return how chunks lie in the existing files; if there are none, or they do not fit, delete them and choose again.

        Raises:
            ConfigError: the budget is below one chunk.
            OSError: the files cannot be used, or it cannot be read what they are; then nothing is deleted.
        """
        known, room = read_description(self.path).geometry, self._budget.shard_bytes - _OTHER_BYTES
        sizes, types = self._opening.chunk_sizes, self._opening.number_types
        if known is not None and known.segment_bytes <= room:
            plan = SlotPlan.with_slots(known.slot_bytes, sizes) if known.packs else SlotPlan.of(sizes)
            if _fits(known, _single(plan, namespace)):
                self._warn_of_small(known, room)
                return plan, known
        plan = SlotPlan.of_packed(sizes, types) if self._opening.codec.number_types else SlotPlan.of(sizes)
        single, most = _single(plan, namespace), plan.most
        require_room(self._budget, single)
        is_described = known is not None
        why = "they do not fit the chunks or max_bytes" if is_described else f"{DESCRIPTION_FILE} is missing or damaged"
        self._delete_segments(0, why)
        usual = max(_SEGMENT_BYTES, room // _USUAL_SEGMENTS) // single.slot_bytes
        in_room = room // single.segment_bytes * most // _LEAST_SEGMENTS
        geometry = replace(single, slots_per_segment=max(most, min(usual, in_room)))
        write_description(self.path, namespace.describe(), geometry)
        return plan, geometry

    def _warn_of_small(self, known: Geometry, room: int) -> None:
        if _MOST_SEGMENTS * known.segment_bytes <= room - known.segment_bytes:
            logger.warning(
                "disk tier in %s: its files were made for a smaller budget and can hold only %s of %s; to use all, delete "
                "this directory while no engine uses it",
                self.path,
                format_bytes(_MOST_SEGMENTS * known.segment_bytes),
                format_bytes(room),
            )

    def _most_segments(self) -> int:
        within_budget = max(0, self._budget.shard_bytes - _OTHER_BYTES) // self.geometry.segment_bytes
        return min(_MOST_SEGMENTS, within_budget)

    def _segment_path(self, number: int) -> Path:
        return self.path / f"segment-{number:05d}"

    def _open_segments(self, namespace: Namespace) -> None:
        """Open the segments that are whole and within the limits, and delete the others.

        What fits of them is moved first. Then delete unused shards in the directory, if it is above its budget.
        """
        paths = map(self._segment_path, count())
        found = list(takewhile(lambda path: all(file.exists() for file in segment_files(path)), paths))
        most = self._most_segments()
        allow_open_files(4 * _FILES_PER_SEGMENT * max(most, len(found)))
        segments = (Segment(path, self.geometry, direct_io=self._direct_io) for path in found)
        self.segments = list(takewhile(Segment.is_whole, segments))
        self._delete_segments(len(self.segments), "they are damaged")
        if len(self.segments) > most:
            if num_lost := move_down(self.segments, most, time.monotonic() + MOVE.seconds()):
                message = "disk tier in %s: %s used longest ago are deleted, because max_bytes is lower than before"
                logger.warning(message, self.path, format_count(num_lost, "chunk"))
            del self.segments[most:]
            self._delete_segments(most)
        with brief_lock(self._root):  # the budget may have been larger before
            excess = bytes_in(self._root) - self._others_excess(namespace) - self._budget.root_bytes
            make_smaller(self._root, self.path, excess)

    def _others_excess(self, namespace: Namespace) -> int:
        """Return the bytes by which shards of this engine's other workers exceed their share of the budget.

        These workers delete the excess when they open their shards. It is not made up for by deleting whole shards, because a
        chunk is of use only if all workers have their shard of it. A shard whose description cannot be read may be theirs.
        """
        own = _without_rank(namespace.describe())
        others = (path for path in shards_in(self._root) if path != self.path and _may_be_of(path, own))
        return sum(max(0, bytes_in(path) - self._budget.shard_bytes) for path in others)

    def _delete_segments(self, first: int, why: str = "") -> None:
        """Delete all segments from number ``first`` on; if they have chunks, log ``why``, if given. Raises ``OSError``."""
        files = [
            file
            for file in self.path.glob("segment-*")
            if is_own(file.name) and int(file.stem.removeprefix("segment-")) >= first
        ]
        num_lost = sum(file.suffix == ".headers" and may_hold_chunks(file) for file in files)
        if num_lost and why:
            lost = format_count(num_lost, "segment")
            logger.warning("disk tier in %s: deleting %s with chunks, because %s", self.path, lost, why)
        for file in files:
            file.unlink()

    def _make_room(self) -> str:
        """Delete unused shards if that makes room for a segment; return why there is none, if so. Raises ``OSError``."""
        need, budget = self.geometry.segment_bytes, self._budget
        least_free = need + budget.reserve_bytes
        excess = bytes_in(self._root) + need + _OTHER_BYTES - budget.root_bytes
        missing = least_free - free_bytes(self._root)
        has_room = make_room(self._root, self.path, max(excess, missing))
        # What was deleted may take space all the same, if another process has it open.
        if (free := free_bytes(self._root)) < least_free:
            reserve = (
                f", of which reserve_bytes keeps {format_bytes(budget.reserve_bytes)}" if budget.reserve_bytes else ""
            )
            return f"the next {format_bytes(need)} do not fit: {format_bytes(free)} are free{reserve}"
        return "" if has_room else f"other files take the rest of max_bytes in {self._root}"

    def _add_segment(self) -> None:
        """Add a segment, or leave nothing of it. Raises ``OSError``."""
        path = self._segment_path(len(self.segments))
        try:
            segment = Segment(path, self.geometry, direct_io=self._direct_io)
            _leave_files(segment)
            segment.allocate()
        except OSError:
            for file in (*segment_files(path), uses_file(path)):
                file.unlink(missing_ok=True)
            raise
        self.segments = [*self.segments, segment]


def _leave_files(segment: Segment) -> None:
    """Raise ``OSError`` if a new segment's files are among the last that can be opened, which the program needs."""
    if not leaves_files(segment.last_descriptor):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def free_bytes(directory: Path) -> int:
    """Return the free space of a file system in bytes, for users other than the superuser. Raises ``OSError``."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _single(plan: SlotPlan, namespace: Namespace) -> Geometry:
    """Return the geometry with segments for one chunk of the largest size."""
    details_bytes = plan.details_room(namespace.details_bytes)
    return Geometry(plan.slot_bytes, plan.most, details_bytes, plan.link_bytes, plan.packs)


def _fits(known: Geometry, single: Geometry) -> bool:
    """Whether files have slots like those of ``single``, and enough of them in a segment for a chunk."""
    most = single.slots_per_segment
    return known.slots_per_segment >= most and replace(known, slots_per_segment=most) == single


def require_place(budget: ShardBudget) -> None:
    """Raise ``ConfigError`` if a directory cannot be used, or holds less than the budget. Creates nothing."""
    try:
        check_budget(place_of(budget.root), budget)
    except OSError as error:
        raise _unusable(budget.root, error) from error


def require_unused(budget: ShardBudget, namespace_ids: Callable[[], Iterable[str]] | None = None) -> None:
    """See ``TierConfig.require_unused``. Creates nothing."""
    try:
        if budget.root.is_dir() and (used := [shard for shard in shards_in(budget.root) if _is_used(shard)]):
            if namespace_ids is None:
                shards = [shard for shard in used if is_of_engine(shard)]
            else:
                shards = [budget.root / name for name in namespace_ids()]
            if all(any(map(_is_used, shards)) for _ in _tries(budget.root)):
                raise _used(budget.root)
    except OSError as error:
        raise _unusable(budget.root, error) from error


def _is_used(shard: Path) -> bool:
    with brief_lock(shard.parent):
        return is_in_use(shard)


def _tries(root: Path) -> Iterator[None]:
    """Yield again and again, as long as a start waits for another process to end."""
    yield
    if wait_s := LOCK.seconds():
        logger.warning("disk tier in %s: another process uses it; waiting %g s for it to end", root, wait_s)
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        time.sleep(_LOCK_POLL_S)
        yield


def _used(root: Path) -> ConfigError:
    reason = "another tier uses it for the same model; give each engine, and each of its tiers, its own directory"
    return ConfigError("directory", str(root), reason)


def check_budget(root: Path, budget: ShardBudget) -> None:
    """Refuse a budget that the file system can never hold.

    Raises:
        ConfigError: it is too large.
        OSError: the file system cannot be asked.
    """
    status = os.statvfs(root)
    total = status.f_blocks * status.f_frsize
    if not total:
        raise OSError(errno.EOPNOTSUPP, "its file system does not store files", str(root))
    if budget.root_bytes + budget.reserve_bytes > total:
        reserve = f", of which {format_bytes(budget.reserve_bytes)} are a reserve" if budget.reserve_bytes else ""
        raise ConfigError(
            "max_bytes", format_bytes(budget.root_bytes), f"the file system has {format_bytes(total)}{reserve}"
        )


def _may_be_of(shard: Path, engine: dict[str, str]) -> bool:
    """Whether a shard belongs, or may belong, to the engine whose workers have these facts in common."""
    try:
        return _without_rank(read_description(shard).namespace) == engine
    except OSError:
        return True


def _without_rank(facts: dict[str, str]) -> dict[str, str]:
    """Return the facts of a namespace that all workers of an engine have in common; the number of workers is one of them."""
    common = {name: fact for name, fact in facts.items() if name not in ("label", "digest")}
    return common | {"split": _RANK.sub("", common.get("split", ""))}


def _unusable(root: Path, error: OSError) -> ConfigError:
    where = f"{error.filename}: " if error.filename else ""
    expected = "more files must be open than allowed (ulimit -n)" if error.errno in _TOO_MANY_FILES else _USABLE
    reason = f"{expected}: {where}{error.strerror}"
    return ConfigError("directory", str(root), reason)


def require_room(budget: ShardBudget, single: Geometry) -> None:
    """Raise ``ConfigError`` if the budget has no room for a single chunk."""
    need = single.segment_bytes
    if budget.shard_bytes - _OTHER_BYTES < need:
        need_all = format_bytes(need + _OTHER_BYTES)
        raise ConfigError("max_bytes", format_bytes(budget.root_bytes), f"one chunk of one worker needs {need_all}")
