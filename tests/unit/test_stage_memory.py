"""What a stage reports of its memory is what it has, and asking for it never fails."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from vllm_omni.engine import stage_memory
from vllm_omni.health.memory.reports import Reports

MIB = 1 << 20


def core(*workers: Any, usage: float = 0.25) -> Any:
    """An engine core with its workers in the same process."""
    config = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=3 * MIB)] * 2)
    return SimpleNamespace(
        model_executor=SimpleNamespace(collective_rpc=lambda call: [call(w) for w in workers]),
        scheduler=SimpleNamespace(
            kv_cache_config=config, kv_cache_manager=SimpleNamespace(usage=usage)
        ),
    )


def worker(kv: torch.Tensor, **fields: Any) -> Any:
    model = torch.nn.Linear(512, 512, bias=False)
    model.head = torch.nn.Linear(512, 512, bias=False)
    model.head.weight = model.weight
    runner = SimpleNamespace(model=model, kv_caches=[kv])
    return SimpleNamespace(device=torch.device("cpu"), model_runner=runner, **fields)


def test_weights_and_kv_cache_are_counted_once_and_as_far_as_they_are_in_memory() -> None:
    kv = torch.empty(64 * MIB, dtype=torch.uint8)
    kv[: 16 * MIB].fill_(1)
    answer = stage_memory.figures(core(worker(kv)))
    (rank,) = answer["ranks"]
    weights = 512 * 512 * 4
    assert rank["allocated"] == 64 * MIB + weights
    assert abs(rank["reserved"] - weights - 16 * MIB) < 2 * MIB
    assert rank["pid"] == os.getpid()
    assert (answer["kv_total"], answer["kv_used"]) == (6 * MIB, 6 * MIB // 4)
    kv.fill_(1)
    (rank,) = stage_memory.figures(core(worker(kv)))["ranks"]
    assert rank["reserved"] == rank["allocated"]


def test_the_answer_can_be_read_on_the_other_side() -> None:
    reports = Reports()
    reports.receive((0, 0), stage_memory.figures(core(worker(torch.zeros(8)))))
    ((_, report),) = reports.latest().values()
    assert report.ranks[0].device == "cpu"
    assert report.kv_total == 6 * MIB


def test_a_worker_that_cannot_say_leaves_the_others_alone() -> None:
    answer = stage_memory.figures(core(SimpleNamespace(), worker(torch.zeros(8))))
    assert len(answer["ranks"]) == 1


def test_an_executor_that_fails_is_no_failure_of_the_ping() -> None:
    def fail(_call: Any) -> None:
        raise RuntimeError("Executor failed.")

    broken = core()
    broken.model_executor.collective_rpc = fail
    assert stage_memory.figures(broken) == {}
