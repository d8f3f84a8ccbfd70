"""How vLLM's workers take new weights: from a folder of safetensors, or as they come from the trainer's memory.

A weight-transfer engine of vLLM's own interface, registered by `agent.engines.vllm.plugin`; imported in the server's
environment, so it needs nothing but what vLLM itself brings. `update_weights` understands

    {"path": folder}                     a whole snapshot, which `finish_weight_update` loads
    {"manifest": {name: [dtype, shape]}} what a stream will bring, then
    {"bucket": [name, ...]}              some of it, broadcast to a group that `init_weight_transfer_engine` has joined,
    {"bucket": ..., "shared": handle}    or in memory that both see
    {"abandon": true}                    no more will come: refused, and the engine ends if it has loaded some of it

What is refused has changed nothing. An engine that fails in the middle ends itself: a token that is sampled from half
of the weights would be worse than none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.engines import weight_stream
from agent.engines.weight_stream import Manifest

_log = logging.getLogger("vllm.sao")
_NO_CPU_ADAPTER = (
    "on a CPU vLLM serves no adapter of a mixture of experts: write model.policy_adapter.publish=merged, or use the "
    "local engine"
)


def engine_class() -> Any:
    """The engine, made here because its base exists in the server's environment only."""
    import torch
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class Init(WeightTransferInitInfo):
        """The trainer's process group, for a broadcast; see `weight_stream.join`."""

        host: str
        port: int
        world_size: int
        limit_s: float

    @dataclass
    class Update(WeightTransferUpdateInfo):
        """One of the messages above."""

        path: str | None = None
        manifest: dict[str, list[Any]] | None = None
        bucket: list[str] = field(default_factory=list)
        shared: dict[str, Any] | None = None
        abandon: bool = False

    class Weights(WeightTransferEngine[Init, Update]):
        """The model changes in `finish_weight_update` (a snapshot), or bucket by bucket (a stream)."""

        init_info_cls = Init
        update_info_cls = Update
        supports_draft_weight_update = False
        _group: Any = None
        _folder: Path | None = None
        _manifest: Manifest | None = None
        _received: set[str]
        _finite = True  # the weights that are served

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._received = set()
            if self.device.type == "cpu":
                _check_cpu_heads(self.model_config.get_head_size())
                if self.vllm_config.lora_config is not None and self.model_config.get_num_experts():
                    raise ValueError(_NO_CPU_ADAPTER)

        def init_transfer_engine(self, init_info: Init) -> None:
            parallel = self.parallel_config
            rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
            self.shutdown()
            self._group = weight_stream.join(
                init_info.host, init_info.port, rank, init_info.world_size, self.device, limit_s=init_info.limit_s
            )

        def start_weight_update(self) -> None:
            self._folder, self._manifest, self._received = None, None, set()

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # Not the base's, which synchronises an accelerator that a CPU has not.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Update) -> None:
            if update_info.path is not None:
                folder = Path(update_info.path)
                self._check(shapes(folder), f"snapshot {folder}")
                self._folder = folder
            elif update_info.manifest is not None:
                manifest = {name: (dtype, tuple(shape)) for name, (dtype, shape) in update_info.manifest.items()}
                self._check({name: shape for name, (_, shape) in manifest.items()}, "the trainer's manifest")
                self._manifest = manifest
            elif update_info.bucket and not update_info.abandon:
                self._load_bucket(update_info.bucket, update_info.shared)
            else:
                if self._received:
                    self._end("a stream was abandoned after %d tensors", len(self._received))
                raise ValueError("abandoned: the weights are as they were")

        def finish_weight_update(self) -> None:
            if self._folder is not None:
                self._load_folder(self._folder)
            elif self._received and self._manifest is not None:
                if missing := self._manifest.keys() - self._received:
                    self._end("%d tensors of a stream never came, the first of them %s", len(missing), min(missing))
                self._guarded(self._finalize)
            else:
                raise ValueError("no weights were given; call /update_weights first")
            self._folder, self._manifest, self._received = None, None, set()
            self.shutdown()

        def shutdown(self) -> None:
            group, self._group = self._group, None
            if group is not None:
                group.abort()

        def _check(self, given: dict[str, tuple[int, ...]], what: str) -> None:
            served = Path(self.model_config.model)
            if served.is_dir():
                check(given, shapes(served), what)

        def _load_folder(self, folder: Path) -> None:
            def load() -> None:
                self._begin()
                self._load(tensors(folder))
                self._finalize()

            self._guarded(load)

        def _load_bucket(self, names: list[str], shared: dict[str, Any] | None) -> None:
            if self._manifest is None or (shared is None and self._group is None):
                raise ValueError("a bucket before its manifest, or a broadcast without /init_weight_transfer_engine")
            manifest = self._manifest

            def receive() -> Any:
                if shared is not None:
                    return weight_stream.opened_buffer(shared, self.device)
                # One for each bucket: the layerwise reload keeps views of it until a layer is complete.
                packed = torch.empty(weight_stream.packed_bytes(manifest, names), dtype=torch.uint8, device=self.device)
                weight_stream.broadcast(self._group, packed)
                return packed

            def load(packed: Any) -> None:
                if not self._received:
                    self._begin()
                self._received.update(names)
                self._load(weight_stream.unpack(packed, manifest, names))

            if self._received or self.parallel_config.world_size_across_dp > 1:  # other workers may be further
                self._guarded(lambda: load(receive()))
            else:  # nothing is loaded yet, so what fails now, say memory on another GPU, is refused
                packed = receive()
                self._guarded(lambda: load(packed))

        def _begin(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            if not self._finite:
                _clear_keys_and_values(self.vllm_config)
            self._finite = True
            initialize_layerwise_reload(self.model)

        def _load(self, weights: Iterable[tuple[str, Any]]) -> None:
            with torch.device(self.device):
                self.model.load_weights(self._noticing(weights))

        def _finalize(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            with torch.device(self.device):
                finalize_layerwise_reload(self.model, self.model_config)
                _repack_tied_head(self.model, self.device)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        def _noticing(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
            for name, tensor in weights:
                self._finite = self._finite and bool(tensor.isfinite().all())
                yield name, tensor

        def _guarded(self, load: Any) -> None:
            try:
                load()
            except BaseException:
                _log.exception("loading weights failed in the middle")
                self._end("the engine ends: half of its weights are new")

        def _end(self, why: str, *values: object) -> None:
            _log.error(why, *values)
            os._exit(1)

    return Weights


def files(folder: Path) -> list[Path]:
    """The safetensors of `folder`; raises ValueError if there are none."""
    snapshots = sorted(folder.glob("*.safetensors"))
    if not snapshots:
        raise ValueError(f"no snapshot in {folder}: it must be a folder with *.safetensors that the engine can read")
    return snapshots


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, from the headers alone. Raises ValueError on a file that is not whole."""
    from safetensors import SafetensorError, safe_open

    result: dict[str, tuple[int, ...]] = {}
    for path in files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                result.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"snapshot {path} can't be read ({error})") from error
    return result


def check(given: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], what: str) -> None:
    """Raise ValueError if `what` is not of the served model."""
    if given != expected:
        missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
        other = sorted(name for name in given.keys() & expected.keys() if given[name] != expected[name])
        raise ValueError(
            f"{what} is of another model: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(extra)} unknown {extra[:3]}, {len(other)} of another shape {other[:3]}"
        )


def tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor, one at a time, those of a layer together."""
    from safetensors import safe_open

    for path in files(folder):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)


def _clear_keys_and_values(vllm_config: Any) -> None:
    """Wipe what weights with NaN have left: a NaN in a page that is used again comes through the attention mask."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        for part in cache if isinstance(cache, list | tuple) else [cache]:
            if part is not None:
                part.zero_()


def _repack_tied_head(model: Any, device: Any) -> None:
    """On a CPU, pack the output layer again.

    One that is tied to the embedding has no weights of its own in a snapshot, so the reload passes it over; but its
    CPU kernel reads a packed copy, which is of the old weights.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if device.type != "cpu":
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)


def _check_cpu_heads(size: int) -> None:
    """Say at the start what would otherwise kill the server at its first request."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if size not in (sizes := CPUAttentionBackend.get_supported_head_sizes()):
        raise ValueError(f"vLLM has no CPU attention for head_dim {size}, only for {sizes}: use the local engine")
