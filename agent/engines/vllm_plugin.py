"""What this project adds inside vLLM's own processes: weight snapshots, and an end with whoever started them.

`register` is a `vllm.general_plugins` entry point, called in the API server, the engine core and every worker. It is
imported in the server's environment, so it needs nothing but what vLLM itself brings.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKEND = "snapshot"  # --weight-transfer-config '{"backend": "snapshot"}'
OWNER = "SAO_ENGINE_OWNER"  # "pid:creation time" of the process that every process of the server ends with

_log = logging.getLogger("vllm.sao")


def register() -> None:
    """Add the weight-transfer backend "snapshot" and watch the owner, if there is one. Harmless when repeated."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _engine_class())
        _rebuild_cpu_experts()
        _watch()
        os.register_at_fork(after_in_child=_watch)  # threads do not follow a fork


def _engine_class() -> Any:
    """The engine, made here because its base exists in the server's environment only."""
    import torch
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class SnapshotInit(WeightTransferInitInfo):
        """Nothing to agree on beforehand."""

    @dataclass
    class SnapshotUpdate(WeightTransferUpdateInfo):
        """`path`: a folder with *.safetensors that this process can read (disk or shared memory)."""

        path: str

    class SnapshotEngine(WeightTransferEngine[SnapshotInit, SnapshotUpdate]):
        """Reads a whole snapshot. `update_weights` only checks it; the model changes in `finish_weight_update`.

        So a snapshot that is missing, cut short, or of another model is refused with nothing changed.
        """

        init_info_cls = SnapshotInit
        update_info_cls = SnapshotUpdate
        supports_draft_weight_update = False
        _folder: Path | None = None
        _finite = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.device.type == "cpu":
                _check_cpu_heads(self.model_config.get_head_size())

        def init_transfer_engine(self, init_info: SnapshotInit) -> None: ...

        def start_weight_update(self) -> None:
            self._folder = None

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # Not the base's: nothing is on its way to a device yet, and a CPU has nothing to synchronise.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: SnapshotUpdate) -> None:
            folder = Path(update_info.path)
            found = shapes(folder)
            served = Path(self.model_config.model)
            if served.is_dir():
                check(found, shapes(served), folder)
            self._folder = folder

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

            if self._folder is None:
                raise ValueError("no snapshot was given; call /update_weights with {'path': folder} first")
            folder, self._folder = self._folder, None
            try:
                if not self._finite:
                    _clear_keys_and_values(self.vllm_config)
                self._finite = True
                initialize_layerwise_reload(self.model)
                with torch.device(self.device):
                    self.model.load_weights(self._noticing(tensors(folder)))
                    finalize_layerwise_reload(self.model, self.model_config)
                    _repack_tied_head(self.model, self.device)
                torch.accelerator.synchronize() if torch.accelerator.is_available() else None
            except BaseException:
                # Half of the weights are new: a token sampled from this would be worse than none.
                _log.exception("the snapshot %s could not be loaded; the engine ends", folder)
                os._exit(1)

        def _noticing(self, weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
            for name, tensor in weights:
                self._finite = self._finite and bool(tensor.isfinite().all())
                yield name, tensor

        def shutdown(self) -> None: ...

    return SnapshotEngine


def files(folder: Path) -> list[Path]:
    """The safetensors of `folder`; raises ValueError if there are none."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(f"no snapshot in {folder}: it must be a folder with *.safetensors that the engine can read")
    return found


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


def check(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Raise ValueError if a snapshot is not of the served model."""
    if found != expected:
        missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        other = sorted(name for name in found.keys() & expected.keys() if found[name] != expected[name])
        raise ValueError(
            f"snapshot {folder} is of another model: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(extra)} unknown {extra[:3]}, {len(other)} of another shape {other[:3]}"
        )


def tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor, one at a time, those of a layer together."""
    from safetensors import safe_open

    for path in files(folder):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)


def _rebuild_cpu_experts() -> None:
    """On a CPU, make every load of MoE weights build their kernel again.

    A second load copies into the first one's storage, but the CPU kernel keeps its experts packed elsewhere: it would
    go on with the old experts, silently. On a GPU the storage is what captured graphs read, so it stays.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    setup: Callable[..., None] = UnquantizedFusedMoEMethod._setup_kernel

    def rebuild(self: Any, *args: Any, **kwargs: Any) -> None:
        self.moe_kernel = None
        setup(self, *args, **kwargs)

    UnquantizedFusedMoEMethod._setup_kernel = rebuild


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


def _watch() -> None:
    """Threads that end this process with its owner and with its parent, however those end (SIGKILL too)."""
    owner = os.environ.get(OWNER)
    if owner:
        threading.Thread(target=_end_with_owner, args=(owner,), name="sao-owner", daemon=True).start()
        parent = multiprocessing.parent_process()
        if parent is not None:
            threading.Thread(target=_end_with, args=(parent.join,), name="sao-parent", daemon=True).start()


def _end_with_owner(owner: str) -> None:
    import psutil

    pid, _, created = owner.partition(":")

    def gone() -> None:
        try:
            process = psutil.Process(int(pid))
            if abs(process.create_time() - float(created)) < 5:  # or else the number is somebody else's by now
                process.wait()
        except psutil.NoSuchProcess:
            pass

    _end_with(gone)


def _end_with(wait: Callable[[], object]) -> None:
    wait()
    os.kill(os.getpid(), signal.SIGKILL)  # nobody is left to receive anything
