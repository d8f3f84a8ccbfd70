"""How a recipe's engine is started, `local` or vLLM: the same for a learner and for a server."""

from __future__ import annotations

from asyncio.subprocess import Process
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from agent.engines.base import EngineFault
from agent.engines.local.launch import launch_local
from agent.engines.vllm.launch import launch_vllm


class EngineSection(Protocol):
    """What the section `engine` of a recipe says of a launch, a learner's recipe and a server's alike."""

    @property
    def launch(self) -> Literal["local", "vllm"]: ...
    @property
    def max_sequences(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def vllm_eager(self) -> bool: ...
    @property
    def vllm_environment(self) -> Path | None: ...
    @property
    def vllm_options(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """Everything of a launch but the weights. What is vLLM's alone has no effect on a `local` engine.

    engine = EngineLaunch(kind="vllm", dtype="bfloat16", parallel=2, devices="1,2")
    process, url = await engine.start(model, version=3, log=log, key=key)

    `parallel`: GPUs of one engine; `devices`: its CUDA_VISIBLE_DEVICES, None: this process's.
    """

    kind: Literal["local", "vllm"]
    max_sequences: int = 64
    max_context: int = 4096
    threads: int = 1
    dtype: str = "auto"
    eager: bool = True
    environment: Path | None = None
    options: tuple[str, ...] = ()
    parallel: int = 1
    devices: str | None = None
    returns_experts: bool = False

    @classmethod
    def of(
        cls, section: EngineSection, *, dtype: str, parallel: int, devices: str | None, returns_experts: bool = False
    ) -> EngineLaunch:
        """The launch that a recipe's section `engine` asks for; the rest comes from its other sections."""
        return cls(
            kind=section.launch,
            max_sequences=section.max_sequences,
            max_context=section.max_context,
            threads=section.threads,
            dtype=dtype,
            eager=section.vllm_eager,
            environment=section.vllm_environment,
            options=section.vllm_options,
            parallel=parallel,
            devices=devices,
            returns_experts=returns_experts,
        )

    async def start(self, model: Path, *, version: int, log: Path, key: str, port: int = 0) -> tuple[Process, str]:
        """Its process and its URL, once it serves the folder `model` as `version`; `port` 0: any. Raises `EngineFault`.

        End it with `agent.child_processes.stop_child`.
        """
        shared: dict[str, Any] = {
            "version": version,
            "log": log,
            "key": key,
            "port": port,
            "max_sequences": self.max_sequences,
            "max_context": self.max_context,
            "threads": self.threads,
        }
        if self.kind == "local":
            return await launch_local(model, **shared)
        tensor_parallel = ("--tensor-parallel-size", str(self.parallel)) if self.parallel > 1 else ()
        return await launch_vllm(
            model,
            **shared,
            dtype=self.dtype,
            eager=self.eager,
            environment=self.environment,
            options=(*tensor_parallel, *self.options),
            returns_experts=self.returns_experts,
            devices=self.devices,
        )


def devices_after(learner_gpus: int, index: int, each: int, visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of the `index`-th engine of `each` GPUs, behind the learner's first ones of `visible`.

    Raises `EngineFault` where there are not so many.
    """
    first = learner_gpus + index * each
    names = visible.split(",") if visible else [str(i) for i in range(first + each)]
    chosen = names[first : first + each]
    if len(chosen) < each:
        raise EngineFault(
            f"engine {index} needs {each} GPUs after the learner's {learner_gpus}, and CUDA_VISIBLE_DEVICES names "
            f"{len(names)}; change hardware, or start engines elsewhere and give engine.urls"
        )
    return ",".join(chosen)
