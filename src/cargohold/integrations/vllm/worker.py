"""Worker side: makes the contract's calls in the contract's order, whatever the order of vLLM's calls is."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch

from cargohold.errors import ConfigError
from cargohold.integrations.vllm.messages import RankReport, StepMessage, WorkerMessage
from cargohold.protocol import (
    KVCacheLayout,
    KVConnectorFactory,
    KVConnectorOutput,
    NullConnectorWorker,
    WorkerConnectorGuard,
    WorkerEnvironment,
)


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Where a contiguous part of every block lies.

    Attributes:
        storage: which allocation, counted in the order of layers. Addresses would say it too, but in another order after a
            restart, when a tier's chunks are read again.
        block_stride: bytes from one block to the next.
        offset: byte in the allocation where block 0's part starts.
        width: its bytes.
    """

    storage: int
    block_stride: int
    offset: int
    width: int

    @property
    def end(self) -> int:
        """Byte behind block 0's part."""
        return self.offset + self.width


def regions_of(kv_caches: Mapping[str, Any], num_blocks: int) -> list[torch.Tensor]:
    """Two-dimensional ``uint8`` views of shape ``(num_blocks, width)`` that together hold every block.

    Their order is the same after a restart.

    Args:
        kv_caches: what vLLM registers: per layer a tensor, or several for layers with several states.
        num_blocks: blocks of the pool.

    Raises:
        ValueError: a tensor has no dimension that counts blocks.
    """
    tensors = [tensor for kv_cache in kv_caches.values() for tensor in _tensors(kv_cache)]
    storages = {_address(tensor): tensor for tensor in tensors}
    numbers = {address: number for number, address in enumerate(storages)}
    pieces = [piece for tensor in tensors for piece in pieces_of(tensor, num_blocks, numbers[_address(tensor)])]
    in_order = list(storages.values())
    return [_view(in_order[piece.storage], piece, num_blocks) for piece in merge(pieces)]


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Unite pieces that touch or overlap."""
    merged: list[Piece] = []
    for piece in sorted(set(pieces)):
        last = merged[-1] if merged else None
        is_same_row = last is not None and (last.storage, last.block_stride) == (piece.storage, piece.block_stride)
        if last is not None and is_same_row and piece.offset <= last.end:
            merged[-1] = replace(last, width=max(last.end, piece.end) - last.offset)
        else:
            merged.append(piece)
    return merged


def pieces_of(tensor: torch.Tensor, num_blocks: int, storage: int) -> list[Piece]:
    """The contiguous parts of a block in one tensor, whose allocation has the number ``storage``."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    at = _block_dimension(tensor.shape, num_blocks)
    # An attention kernel may see a block as several smaller ones, one after the other.
    ratio = tensor.shape[at] // num_blocks
    inner = [(ratio, strides[at])]
    inner += [(tensor.shape[dim], strides[dim]) for dim in range(tensor.dim()) if dim != at]
    width, outer = _contiguous(inner, size)
    start = int(tensor.storage_offset()) * size
    return [
        Piece(storage, strides[at] * ratio, start + sum(steps), width)
        for steps in itertools.product(*([step * stride for step in range(count)] for count, stride in outer))
    ]


def _contiguous(dimensions: Sequence[tuple[int, int]], width: int) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of the longest contiguous run, and the dimensions that repeat it; a dimension is a size and a stride."""
    outer: list[tuple[int, int]] = []
    for count, stride in sorted(dimensions, key=lambda dimension: dimension[1]):
        if count == 1:
            continue
        if stride == width and not outer:
            width *= count
        else:
            outer.append((count, stride))
    return width, outer


def _block_dimension(shape: Sequence[int], num_blocks: int) -> int:
    """Blocks come first, or second behind keys and values."""
    for at in (0, 1):
        if at < len(shape) and shape[at] >= num_blocks and shape[at] % num_blocks == 0:
            return at
    raise ValueError(f"a KV tensor of shape {tuple(shape)} does not say where its {num_blocks} blocks are")


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _tensors(kv_cache: Any) -> list[torch.Tensor]:
    return [kv_cache] if isinstance(kv_cache, torch.Tensor) else list(kv_cache)


def _view(tensor: torch.Tensor, piece: Piece, num_blocks: int) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return flat.as_strided((num_blocks, piece.width), (piece.block_stride, 1), piece.offset)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """Requests whose transfers ended on this rank.

    Attributes:
        sent: the connector no longer reads their blocks.
        received: their loads have ended, failed ones included.
        failed: those of them whose load failed.
        invalid_block_ids: the blocks that failed loads were to fill.
    """

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()


class WorkerSide:
    """The adapter's worker side: runs one rank's part of the connector, contained in a guard.

    Args:
        rank: which worker this is, from 0.
        obstacle: why this rank cannot take part, as a sentence; ``None`` if it can. The scheduler side hears of it in the first
            report, if it has not turned the connector off by itself.
    """

    def __init__(self, rank: int, obstacle: str | None = None) -> None:
        self._rank = rank
        self._guard = WorkerConnectorGuard(NullConnectorWorker())
        self._guard.stop()  # messages are ignored until the connector is made, and for good if it cannot be made
        self._layer_names: tuple[str, ...] = ()
        self._message: StepMessage | None = None
        self._has_saved = False
        self._report = RankReport()
        # Transfers that have not ended on this rank: loads with the blocks they fill, and requests whose blocks are kept.
        self._loading: dict[str, tuple[int, ...]] = {}
        self._sending: set[str] = set()
        self._failed: set[str] = set()
        # What the scheduler side has not heard of yet.
        self._untold_error = None if obstacle is None else f"rank {rank} cannot take part: {obstacle}"

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, Any],
        factory: KVConnectorFactory,
        layout: KVCacheLayout,
        clock: Callable[[], float],
    ) -> None:
        """Take the paged KV; the connector is made now that its size is known.

        Args:
            kv_caches: vLLM's tensors, by layer.
            factory: makes the connector.
            layout: the paged KV, as the scheduler side knows it.
            clock: monotonic time in seconds.
        """
        try:
            regions = regions_of(kv_caches, layout.num_blocks)
            # Padding between regions is left out, so a row may be shorter here than the scheduler side assumes: then there
            # are more of them than it will use.
            own = replace(layout, block_bytes=_checked(sum(region.shape[1] for region in regions), layout))
            self._guard = WorkerConnectorGuard(factory.make_worker_side(WorkerEnvironment(own, self._rank, clock)))
            self._layer_names = tuple(name for group in own.groups for name in group.layer_names)
        except ConfigError as error:
            raise ConfigError(f"kv_connector_extra_config.{error.key}", error.value, error.expected) from None
        except Exception as error:  # whatever it is, vLLM can serve without offloading
            logger.exception("rank %d cannot take part in offloading", self._rank)
            self._untold_error = f"rank {self._rank} could not register the KV cache: {error!r}"
            return
        # A block id belongs to one group at a time, so all groups share the same bytes.
        self._guard.register_kv_caches([regions] * len(layout.groups))

    def begin(self, message: StepMessage) -> None:
        """Take this step's message. May be called twice in a step; only the first time counts."""
        if self._message is message:
            return
        if self._message is not None:
            self.end()  # with speculation, vLLM 0.32 leaves this call out on all pipeline stages but the last
        self._message = message
        self._has_saved = False
        self._loading |= message.new_loads
        self._sending |= set(message.new_sends)
        if message.stop:
            self._guard.stop()
        self._guard.bind_connector_metadata(message.inner)
        self._guard.handle_preemptions()

    def start_load(self) -> None:
        """Start the loads. Their blocks are not part of this step's forward pass, so they need not wait for it."""
        self._guard.start_load_kv()
        if self._message is not None and self._message.synchronous:
            for name in self._layer_names:
                self._guard.wait_for_layer_load(name)

    def save(self) -> None:
        """The forward pass is over: start the stores."""
        self._has_saved = True
        if self._guard.listens_to_layers:
            for name in self._layer_names:
                self._guard.save_kv_layer(name)
        self._guard.wait_for_save()

    def collect(self, finished_req_ids: AbstractSet[str]) -> Ended:
        """The transfers that ended since the last call. Also prepares this step's report for ``build_meta``."""
        output = self._with_synchronous(self._guard.collect(finished_req_ids))
        error = self._guard.take_error() or self._untold_error
        self._untold_error = None
        stopped = self._message is not None and self._message.stop
        for request_id, block_ids in self._loading.items():
            if not output.invalid_block_ids.isdisjoint(block_ids):
                self._failed.add(request_id)
        # vLLM ends itself if it hears of a request that it does not know.
        received = frozenset(self._loading if stopped else output.finished.finished_recving & self._loading.keys())
        sent = frozenset(self._sending if stopped else output.finished.finished_sending & self._sending)
        failed = received if stopped else received & (output.finished.failed_recving | self._failed)
        invalid = frozenset(block_id for request_id in failed for block_id in self._loading.get(request_id, ()))
        self._failed -= received
        self._sending -= sent
        for request_id in received:
            del self._loading[request_id]
        self._report = RankReport(output, failed, error, stopped)
        return Ended(sent, received, failed, invalid)

    def _with_synchronous(self, output: KVConnectorOutput) -> KVConnectorOutput:
        """Add the end of the loads that ended within this step: nobody else reports them."""
        synchronous = () if self._message is None else self._message.synchronous
        if not synchronous:
            return output
        if self._guard.is_stopped:
            self._failed.update(synchronous)  # maybe before it had loaded them
        received = output.finished.finished_recving.union(synchronous)
        return replace(output, finished=replace(output.finished, finished_recving=received))

    def build_meta(self) -> WorkerMessage | None:
        """This rank's report; ``None`` if there is nothing to report."""
        report, self._report = self._report, RankReport()
        is_silent = report.output.is_empty() and not (report.failed_loads or report.error or report.stopped)
        return None if is_silent else WorkerMessage({self._rank: report})

    def end(self) -> None:
        """End the step, whatever happened in it."""
        if self._message is not None and not self._has_saved:
            self._guard.wait_for_save()  # vLLM 0.28 leaves this call out in steps without tokens
        self._message = None
        self._guard.clear_connector_metadata()

    def shutdown(self) -> None:
        """Let transfers in flight end."""
        self._guard.stop()


def _checked(block_bytes: int, layout: KVCacheLayout) -> int:
    if block_bytes > layout.block_bytes:
        raise ValueError(f"a block takes {block_bytes} bytes here, and {layout.block_bytes} in the layout")
    return block_bytes
