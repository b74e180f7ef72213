# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What a stage itself knows of its memory; found out in the stage's process.

An engine core answers each ping with it. A diffusion worker cannot be asked while it runs a step,
and a step can be a whole request; there a thread leaves it in a file for the server instead.

Nothing here raises: figures that cannot be had are left out. They are plain numbers and names,
as ``vllm_omni.health.memory.reports`` reads them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from vllm_omni.health.memory.reports import PERIOD_S, leave_report
from vllm_omni.health.processes.left_behind import own_folder

logger = logging.getLogger(__name__)

_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)

_SMALL_PAGES = 256
"""Tensors up to this many pages are taken to be in memory as a whole."""

_LOOKED_AT = 256
"""How many pages of a larger tensor are looked at, at about a microsecond each."""


def figures(engine_core: Any) -> dict[str, Any]:
    """The answer to a ping of this engine core. On its busy loop, between steps.

    The workers are asked without a bound, as vLLM asks them for everything: an answer that came
    after its bound would be taken for that to the next question. One that never comes is a hang,
    and is found as such.
    """
    answer: dict[str, Any] = {}
    try:
        ranks = engine_core.model_executor.collective_rpc(of_worker)
        answer["ranks"] = [rank for rank in ranks if rank is not None]
        answer |= _kv_cache(engine_core.scheduler)
    except Exception:
        logger.debug("[health] no memory figures", exc_info=True)
    return answer


def of_worker(worker: Any) -> dict[str, Any] | None:
    """One rank's figures. Called in the process that the worker runs in."""
    try:
        worker = getattr(worker, "worker", worker)
        device = torch.device(worker.device)
        return {"pid": os.getpid(), **of_device(device, worker)}
    except Exception:
        logger.debug("[health] no memory figures", exc_info=True)
        return None


def of_device(device: torch.device, worker: Any = None) -> dict[str, Any]:
    """What torch's allocator holds on ``device`` in this process, and who the device is.

    On CPU torch keeps no books: the weights and the KV cache of ``worker`` are counted, and
    what is reserved is what of them is in memory, since the kernel gives pages when first used.
    """
    if device.type == "cpu":
        storages = _storages(worker)
        return {
            "device": "cpu",
            "allocated": sum(storages.values()),
            "reserved": sum(resident(*storage) for storage in storages.items()),
        }
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    found: dict[str, Any] = {
        "device": f"{device.type}:{index}",
        "allocated": int(torch.accelerator.memory_allocated(index)),
        "reserved": int(torch.accelerator.memory_reserved(index)),
    }
    if device.type == "cuda":
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        found["uuid"] = None if uuid is None else f"GPU-{uuid}"
    get_info = getattr(torch.accelerator, "get_memory_info", None)
    if get_info is not None:
        free, total = get_info(index)
        found |= {"free": int(free), "total": int(total)}
    return found


def _storages(worker: Any) -> dict[int, int]:
    """Addresses and sizes of a worker's weights and KV cache; one that is shared counts once."""
    runner = worker.model_runner
    model = runner.model if hasattr(runner, "model") else runner.pipeline
    storages = {}
    for tensor in [*model.parameters(), *model.buffers(), *getattr(runner, "kv_caches", ())]:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return storages


def resident(address: int, size: int) -> int:
    """About how many of these bytes of this process are in memory: mincore(2) on some pages."""
    first = address - address % _PAGE
    pages = -(-(address + size - first) // _PAGE)
    if pages <= _SMALL_PAGES:
        return size
    step = max(1, pages // _LOOKED_AT)
    looked_at = range(0, pages, step)
    state = ctypes.create_string_buffer(1)
    present = 0
    for page in looked_at:
        where = ctypes.c_void_p(first + page * _PAGE)
        if _libc.mincore(where, ctypes.c_size_t(_PAGE), state) != 0:
            return size
        present += state.raw[0] & 1
    return size * present // len(looked_at)


def _kv_cache(scheduler: Any) -> dict[str, Any]:
    """The KV cache of one rank, and how much of it is in use."""
    config = getattr(scheduler, "kv_cache_config", None)
    tensors = getattr(config, "kv_cache_tensors", None) or ()
    total = sum(int(tensor.size) for tensor in tensors)
    usage = float(scheduler.kv_cache_manager.usage)
    return {"kv_total": total, "kv_used": int(total * usage)}


def of_process(worker: Any = None) -> list[dict[str, Any]]:
    """What this process holds, on each device: on accelerators, else of ``worker`` on CPU."""
    if not torch.accelerator.is_available():
        rank = None if worker is None else of_worker(worker)
        return [] if rank is None else [rank]
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "one is available"
    # A device on which this process has taken nothing must not get a context from being asked.
    return [
        {"pid": os.getpid(), **of_device(torch.device(kind.type, index))}
        for index in range(torch.accelerator.device_count())
        if torch.accelerator.memory_reserved(index) > 0
    ]


def report_regularly(
    worker: Any = None,
    period_s: float = PERIOD_S,
    find: Callable[[Any], list[dict[str, Any]]] = of_process,
) -> Callable[[], None]:
    """Leave this process's figures in a file, now and then, for the server; what ends it.

    On a daemon thread. Does nothing where the server has no folder of its own.
    """
    folder = own_folder()
    ended = threading.Event()
    if folder is None:
        return ended.set

    def run() -> None:
        while not ended.is_set():
            try:
                ranks = find(worker)
                if ranks:
                    leave_report(folder, ranks)
            except Exception:
                logger.debug("[health] no memory figures", exc_info=True)
            ended.wait(period_s)

    threading.Thread(target=run, name="health-memory-report", daemon=True).start()
    return ended.set
