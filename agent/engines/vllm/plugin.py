"""What this project adds inside vLLM's own processes: its weight transfer, and an end with whoever started them.

`register` is a `vllm.general_plugins` entry point, called in the API server, the engine core and every worker. It is
imported in the server's environment, so it needs nothing but what vLLM itself brings.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from agent.engines import adapters

BACKEND = "sao"  # --weight-transfer-config '{"backend": "sao"}'
OWNER = "SAO_ENGINE_OWNER"  # "pid:creation time" of the process that every process of the server ends with


def register() -> None:
    """Add the weight-transfer backend "sao" and watch the owner, if there is one. Harmless when repeated."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        from agent.engines.vllm.weight_receiver import engine_class

        WeightTransferEngineFactory.register_engine(BACKEND, engine_class())
        _rebuild_cpu_experts()
        if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1":
            _use_adapter()
        _watch()
        os.register_at_fork(after_in_child=_watch)  # threads do not follow a fork


def _use_adapter() -> None:
    """Let every request that names no model be answered by the base with the adapter of this project's name.

    So whoever asks for tokens need not know whether the policy is whole weights or an adapter. The request is given it
    as one that is there already: with the mark "load in place" of the publication, every step would read the adapter
    from the disk again, and a request that began before a later publication would bring back the old one, for all.
    """
    import msgspec
    from vllm.entrypoints.serve.engine.serving import BaseServing

    usual: Callable[..., Any] = BaseServing._maybe_get_adapters

    def adapter_of(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        found = usual(self, request, *args, **kwargs)
        if found is None and not request.model:
            found = self.models.lora_requests.get(adapters.NAME)
        return None if found is None else msgspec.structs.replace(found, load_inplace=False)

    BaseServing._maybe_get_adapters = adapter_of


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
