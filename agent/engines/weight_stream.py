"""Weights from a trainer's memory to an engine's without a file in between: both ends of it, and no more than torch.

    manifest ─▶ held against the served model; if it is another one, nothing has changed
    bucket*  ─▶ some tensors, packed; the message says which, the bytes come by one of two ways:
                "broadcast": a process group of the trainer and the engine's workers (NCCL on GPUs, gloo on CPUs)
                "ipc": memory that both processes see (a CUDA handle on one GPU, an anonymous file on a CPU)

The trainer's end is `WeightStreamer`, the engine's is `agent.engines.vllm.weight_receiver`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from agent.engines.base import Call, EngineFault, EngineRefused

Kind = Literal["broadcast", "ipc"]
Manifest = dict[str, tuple[str, tuple[int, ...]]]
"""By name: dtype and shape of a tensor, in the checkpoint's own terms."""

BUCKET_BYTES = 2**28
_ALIGNMENT = 16  # bytes; a tensor must start at a multiple of its item's size


def manifest_of(tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
    """What a pass over `tensors` gives."""
    return {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors}


def packed_bytes(manifest: Manifest, names: Iterable[str]) -> int:
    """How long `pack` makes these tensors."""
    return sum(_padded(_bytes_of(*manifest[name])) for name in names)


def buckets(tensors: Iterable[tuple[str, Tensor]], limit_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors of at most `limit_bytes` together; one that is larger by itself is a bucket of its own."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        more = _padded(tensor.numel() * tensor.element_size())
        if bucket and size + more > limit_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += more
    if bucket:
        yield bucket


def pack(tensors: Sequence[Tensor], out: Tensor) -> None:
    """Write the bytes of `tensors` one after another into `out`, uint8[`packed_bytes`]."""
    at = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten().view(torch.uint8)
        out[at : at + flat.numel()].copy_(flat)
        at += _padded(flat.numel())


def unpack(packed: Tensor, manifest: Manifest, names: Sequence[str]) -> list[tuple[str, Tensor]]:
    """The tensors in `packed`, as views of it."""
    tensors, at = [], 0
    for name in names:
        dtype, shape = manifest[name]
        size = _bytes_of(dtype, shape)
        tensors.append((name, packed[at : at + size].view(getattr(torch, dtype)).view(shape)))
        at += _padded(size)
    return tensors


def _bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    size = getattr(torch, dtype).itemsize
    for length in shape:
        size *= length
    return int(size)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# The process group


def join(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    device: torch.device,
    *,
    limit_s: float,
    listener: int | None = None,
) -> Any:
    """A process group of its own (nothing global is touched), rank 0 being the trainer; blocks until all are there.

    `listener`: the trainer's listening socket (file descriptor), which the group's store takes over.
    """
    limit = timedelta(seconds=limit_s)
    store = dist.TCPStore(
        host, port, world_size, rank == 0, limit, wait_for_workers=False, master_listen_fd=listener, use_libuv=True
    )
    if device.type == "cuda":
        # A peer that dies must be an error of `wait`: otherwise NCCL's watchdog ends this process.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, world_size, nccl)
    gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = limit
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host, port))]
    return dist.ProcessGroupGloo(store, rank, world_size, gloo)


def broadcast(group: Any, buffer: Tensor) -> None:
    """Give rank 0's `buffer` to all; blocks until it is there. Raises RuntimeError when a peer is gone."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([buffer], options).wait()
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to `host`. Nothing is sent."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


# Memory that two processes see


@contextlib.contextmanager
def shared_buffer(size: int, device: torch.device) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """uint8[`size`] on `device`, and in JSON what another process of this user opens it with (`opened_buffer`).

    It is gone when the block ends, or this process.
    """
    if device.type == "cuda":
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        yield buffer, _cuda_handle(buffer)
        return
    name = f"sao-weights-{uuid.uuid4().hex}"
    file = os.memfd_create(name)
    try:
        path = f"/proc/{os.getpid()}/fd/{file}"
        yield (
            torch.from_file(path, shared=True, size=size, dtype=torch.uint8),
            {"path": path, "size": size, "name": name},
        )
    finally:
        os.close(file)


def opened_buffer(handle: dict[str, Any], device: torch.device) -> Tensor:
    """What `shared_buffer` made in another process: a copy, which stays when that is gone.

    Raises ValueError if it is gone already.
    """
    if device.type == "cuda":
        copy = _from_cuda_handle(handle, device).clone()
        torch.cuda.synchronize(device)  # the other side frees its own once it is told
        return copy
    try:
        # The number of a file that is closed may be that of any other file by now.
        there = os.readlink(handle["path"]).startswith(f"/memfd:{handle['name']} ")
    except OSError:
        there = False
    if not there:
        raise ValueError(f"the trainer's memory {handle['path']} is gone, or of another user or machine")
    return torch.from_file(handle["path"], shared=False, size=handle["size"], dtype=torch.uint8).clone()


_BYTES = ("handle", "ref_counter_handle", "event_handle")
_NUMBERS = ("storage_size", "storage_offset", "ref_counter_offset", "event_sync_required")


def _cuda_handle(buffer: Tensor) -> dict[str, Any]:
    (_, handle, size, offset, counter, counter_offset, event, sync) = buffer.untyped_storage()._share_cuda_()
    values = dict(zip(_NUMBERS, (size, offset, counter_offset, sync), strict=True))
    texts = {name: base64.b64encode(v).decode() for name, v in zip(_BYTES, (handle, counter, event), strict=True)}
    return {"gpu": _gpu(buffer.device), "size": buffer.numel(), **values, **texts}


def _from_cuda_handle(handle: dict[str, Any], device: torch.device) -> Tensor:
    if handle["gpu"] != _gpu(device):
        raise ValueError(
            f"the trainer's weights are on GPU {handle['gpu']}, this engine's on {_gpu(device)}: ipc is for one GPU; "
            "use broadcast"
        )
    raw = {name: base64.b64decode(handle[name]) for name in _BYTES}
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index,
        raw["handle"],
        handle["storage_size"],
        handle["storage_offset"],
        raw["ref_counter_handle"],
        handle["ref_counter_offset"],
        raw["event_handle"],
        handle["event_sync_required"],
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (handle["size"],), (1,))


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


# The trainer's end


@dataclass
class WeightStreamer:
    """Gives the tensors of `source` to engines, to several at once if need be; a `WeightStream` for `publish`.

        weights = WeightStreamer(lambda: named_tensors, kind="broadcast")
        await HttpEngine(url).publish(1, weights)

    Each call of `source` gives the same names in the same order, in the checkpoint's format; the tensors must hold
    still until `publish` returns. `limit_s` bounds each wait for an engine.
    """

    source: Callable[[], Iterable[tuple[str, Tensor]]]
    kind: Kind
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    bucket_bytes: int = BUCKET_BYTES
    limit_s: float = 60.0
    _manifest: Manifest | None = None

    @contextlib.asynccontextmanager
    async def connected(self, url: str, call: Call) -> AsyncIterator[Callable[[], Awaitable[object]]]:
        """Connect to the engine at `url`; gives what sends everything to it, in the midst of an update."""
        if self._manifest is None:
            self._manifest = await asyncio.to_thread(lambda: manifest_of(self.source()))
        if self.kind == "ipc":
            yield lambda: self._send(call, None)
            return
        group = await self._connect(url, call)

        async def send() -> None:
            try:
                await self._send(call, group)
            except BaseException:
                group.abort()  # at once: the engine may be waiting for what will never come
                raise

        try:
            yield send
        finally:
            group.abort()

    async def _connect(self, url: str, call: Call) -> Any:
        with _no_streams():
            workers = json.loads(await call("GET", "/get_world_size", None))["world_size"]
        address = urlsplit(url)
        host = await asyncio.to_thread(address_towards, address.hostname or "", address.port or 80)
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listener.getsockname()[1]
        about = {"host": host, "port": port, "world_size": workers + 1, "limit_s": self.limit_s}
        joining = asyncio.to_thread(  # detached there: if it never runs, the socket is closed with its object
            lambda: join(host, port, 0, workers + 1, self.device, limit_s=self.limit_s, listener=listener.detach())
        )
        return await _both(joining, call("POST", "/init_weight_transfer_engine", {"init_info": about}))

    async def _send(self, call: Call, group: Any) -> None:
        assert self._manifest is not None
        with _no_streams():
            await call("POST", "/update_weights", {"update_info": {"manifest": self._manifest}})
        parts = buckets(self.source(), self.bucket_bytes)
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            names, tensors = [name for name, _ in part], [tensor for _, tensor in part]
            size = packed_bytes(self._manifest, names)
            if group is None:
                with shared_buffer(size, self.device) as (buffer, handle):
                    await asyncio.to_thread(pack, tensors, buffer)
                    if buffer.is_cuda:
                        torch.cuda.synchronize(buffer.device)
                    await call("POST", "/update_weights", {"update_info": {"bucket": names, "shared": handle}})
            else:
                buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
                await asyncio.to_thread(pack, tensors, buffer)
                sending = asyncio.to_thread(broadcast, group, buffer)
                await _both(sending, call("POST", "/update_weights", {"update_info": {"bucket": names}}))


@contextlib.contextmanager
def _no_streams() -> Iterator[None]:
    """An engine that does not know the first message of a stream (4xx; vLLM refuses weights with 5xx)."""
    try:
        yield
    except EngineRefused as error:
        raise EngineRefused(
            f"this engine takes no stream of weights: publish folders to it, or use vLLM ({error})", error.status
        ) from None


async def _both(blocking: Awaitable[Any], request: Awaitable[Any]) -> Any:
    """The outcome of `blocking`, which the engine takes part in because of `request`; the first error of either.

    A thread that waits for an engine in vain ends by its own limit, or when its group is aborted.
    """
    tasks = [asyncio.ensure_future(blocking), asyncio.ensure_future(request)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        # What the engine says explains what the transport says, if there is time to hear it.
        for task in reversed(tasks):
            if task.done() and (error := task.exception()) is not None:
                raise error
        return await tasks[0]
    except (RuntimeError, OSError) as error:
        if isinstance(error, EngineFault):
            raise
        raise EngineFault(f"the engine left in the middle of a weight transfer: {error}") from error
    finally:
        for task in tasks:
            task.cancel()
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
