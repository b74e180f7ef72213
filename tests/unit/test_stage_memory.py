# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What a stage reports of its memory is what it has, and asking for it never fails."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.engine.core import EngineCoreProc
from vllm_omni.engine.health import stage_memory
from vllm_omni.engine.health.ar.process import HealthStageEngineCoreProc
from vllm_omni.health.memory.reports import Reports
from vllm_omni.health.processes.left_behind import own_folder

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


# ---- reports in files ------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A server's own folder, as its children see it."""
    folder = tmp_path / "vllm-omni-test"
    folder.mkdir()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(folder))
    return folder


def rank(reserved: int, pid: int = 0) -> dict[str, Any]:
    return {"pid": pid or os.getpid(), "device": "cuda:0", "reserved": reserved}


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_a_process_leaves_its_figures_for_the_server_and_keeps_them_up_to_date(
    folder: Path,
) -> None:
    sizes = iter([MIB, 2 * MIB])
    size = [0]

    def find(_worker: Any) -> list[dict[str, Any]]:
        size[0] = next(sizes, size[0])
        return [rank(size[0])]

    end = stage_memory.report_regularly(None, period_s=0.05, find=find)
    reports = Reports()

    def latest() -> int | None:
        reports.collect(own_folder(), {os.getpid(): (1, 0)})
        found = reports.latest().get((1, 0))
        return None if found is None else found[1].ranks[0].reserved

    until(lambda: latest() == 2 * MIB)
    end()
    assert [name for name in os.listdir(folder) if not name.startswith("memory-")] == []


def test_figures_that_cannot_be_had_do_not_end_the_reports(folder: Path) -> None:
    answers = iter([RuntimeError("no device"), [rank(MIB)]])

    def find(_worker: Any) -> list[dict[str, Any]]:
        answer = next(answers, [rank(MIB)])
        if isinstance(answer, Exception):
            raise answer
        return answer

    end = stage_memory.report_regularly(None, period_s=0.01, find=find)
    until(lambda: os.listdir(folder))
    end()


def test_ranks_of_one_replica_are_one_report_as_old_as_the_oldest(folder: Path) -> None:
    for pid, age in ((7, 100), (8, 0), (9, 0)):
        file = folder / f"memory-{pid}"
        file.write_text(json.dumps([rank(MIB, pid)]))
        os.utime(file, (time.time() - age,) * 2)
    (folder / "memory-10").write_text("not JSON")
    (folder / "memory-x").write_text("[]")
    reports = Reports()
    reports.collect(folder, {7: (0, 0), 8: (0, 0), 9: (0, 1), 10: (0, 2)})
    latest = reports.latest()
    assert set(latest) == {(0, 0), (0, 1)}
    age, report = latest[(0, 0)]
    assert {one.pid for one in report.ranks} == {7, 8}
    assert 99 < age < 200
    assert latest[(0, 1)][0] < 90


def test_nothing_is_left_in_a_folder_that_is_not_the_servers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    assert own_folder() is None
    asked = []
    stage_memory.report_regularly(None, find=lambda worker: asked.append(worker) or [])
    assert asked == []
    Reports().collect(own_folder(), {})


def test_a_diffusion_worker_on_cpu_reports_its_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    runner = SimpleNamespace(pipeline=torch.nn.Linear(512, 512, bias=False))
    wrapper = SimpleNamespace(
        worker=SimpleNamespace(device=torch.device("cpu"), model_runner=runner)
    )
    (found,) = stage_memory.of_process(wrapper)
    assert found["allocated"] == 512 * 512 * 4
    assert stage_memory.of_process() == []
    runner.pipeline = None
    assert stage_memory.of_process(wrapper) == []


def test_workers_are_asked_only_when_there_was_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's workers wait for the next call at full speed for a second after each."""
    asked: list[Any] = []

    def figures(engine_core: Any) -> dict[str, int]:
        asked.append(engine_core)
        return {"n": len(asked)}

    monkeypatch.setattr(stage_memory, "figures", figures)
    monkeypatch.setattr(EngineCoreProc, "_process_engine_step", lambda _self: True)
    engine: Any = object.__new__(HealthStageEngineCoreProc)
    engine.scheduler = SimpleNamespace(has_requests=lambda: True)
    assert [engine.health_ping(), engine.health_ping()] == [{"n": 1}] * 2
    engine._process_engine_step()
    engine._process_engine_step()
    assert [engine.health_ping(), engine.health_ping()] == [{"n": 2}] * 2
    engine.scheduler.has_requests = lambda: False
    engine._process_engine_step()
    assert engine.health_ping() == {"n": 2}
