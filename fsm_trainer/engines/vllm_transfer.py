"""Bringing a snapshot into a running AsyncLLM by the transport it was published with.

Shared memory and directories are read by vLLM's workers (`vllm_worker`). A broadcast and CUDA handles go through vLLM's
weight-transfer API: the other end of the broadcast is the trainer's (`WeightTransport.deliver`), met where the offered
snapshot says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsm_trainer.engines.base import EngineLost, Snapshot
from fsm_trainer.engines.vllm_worker import HALF_LOADED, METHOD, MUST_RESTART, bytes_read, written
from fsm_trainer.engines.weight_sync.transport import CUDA_IPC, NCCL

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

OFFICIAL = {NCCL: "nccl", CUDA_IPC: "ipc"}
"""Transports that are vLLM's own -> what it calls them."""


class Receiver:
    """vLLM's end of the transports. The caller sees to caches and running work."""

    def __init__(self, llm: AsyncLLM) -> None:
        """Nothing has come yet."""
        self._llm = llm
        self._joined = False
        self._half_loaded = False

    async def transfer(self, snapshot: Snapshot, tag: str) -> int:
        """Install the weights and tag them; returns the bytes that came."""
        if snapshot.transport not in OFFICIAL:
            nbytes = bytes_read(await self._llm.collective_rpc(METHOD, args=(written(snapshot),)))
            await self._llm.update_weight_version(tag)
            return nbytes
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        from fsm_trainer.engines.weight_sync.cuda_ipc import ipc_update_info
        from fsm_trainer.engines.weight_sync.nccl import nccl_init_info, nccl_update_info

        if self._half_loaded:
            raise EngineLost(f"{HALF_LOADED}; {MUST_RESTART}")
        if snapshot.transport == NCCL:
            await self._meet(nccl_init_info(snapshot))
            info = nccl_update_info(snapshot)
        else:
            if not self._joined:
                await self._join({})
            info = ipc_update_info(snapshot)
        self._half_loaded = True
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        await self._llm.finish_weight_update(tag)
        self._half_loaded = False
        return snapshot.nbytes

    async def _meet(self, info: dict[str, Any]) -> None:
        """Join the group of this one load, and leave that of the load before, or its communicator would stay."""
        if self._joined:
            await self._llm.shutdown_weight_transfer_engine()
            self._joined = False
        await self._join(info)

    async def _join(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        self._joined = True
