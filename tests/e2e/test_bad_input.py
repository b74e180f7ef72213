# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What the person who starts the server can put right is said in one line, with status 1."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from deployments import MODEL, SERVE, VLLM

from vllm_omni_health.drills.ports import reserved_port
from vllm_omni_health.drills.server import running

_AT_ONCE = 2
_GUARD_S = 180.0


@dataclass
class Case:
    """A command that is to fail, and what its one line on stderr has to name."""

    command: list[str]
    names: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    status: int = 1


@dataclass
class Result:
    status: int | None
    stderr: str
    left: list[str]
    noted: int | None
    """The status in the termination log; None where there is none."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    other_version = tmp_path_factory.mktemp("other-version")
    deploy = tmp_path_factory.mktemp("deploy") / "deploy.yaml"
    deploy.write_text("pipeline: tiny_ar_1\nstages:\n  - stage_id: 0\n    max_num_sqs: 4\n")
    info = other_version / "vllm_omni-0.31.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-omni\nVersion: 0.31.0\n")
    serve = [str(SERVE), "ar-1"]
    with reserved_port() as number, socket.socket() as taken:
        # Connections of an earlier server on this port may still be in TIME_WAIT.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", number))
        taken.listen()
        port = str(number)
        yield {
            "unknown-setting": Case(
                serve, ("VLLM_OMNI_HEALTH_EXIT_GRACE",), {"VLLM_OMNI_HEALTH_EXIT_GRACE": "3"}
            ),
            "wrong-value": Case(
                [*serve, "--additional-config", '{"health": {"exit_grace_s": "soon"}}'],
                ("health.exit_grace_s", '"soon"', "a number of seconds"),
            ),
            "wrong-switch": Case(
                serve, ("VLLM_OMNI_HEALTH", "maybe"), {"VLLM_OMNI_HEALTH": "maybe"}
            ),
            "unsupported-upstream": Case(
                serve, ("0.31.0", "0.30"), {"PYTHONPATH": str(other_version)}
            ),
            "missing-deploy-file": Case(
                [
                    *(str(VLLM), "serve", str(MODEL), "--omni"),
                    *("--deploy-config", "no-such-file.yaml"),
                ],
                ("no-such-file.yaml",),
            ),
            "typo-in-deploy-file": Case(
                [str(VLLM), "serve", str(MODEL), "--omni", "--deploy-config", str(deploy)],
                (str(deploy), "line 4: stage 0: max_num_sqs", "max_num_seqs"),
            ),
            "override-of-no-stage": Case(
                [*serve, "--stage-overrides", '{"1": {"max_num_seqs": 4}}'],
                ("--stage-overrides", "stage 1", "tiny_ar_1 has 0"),
            ),
            "no-such-model": Case(
                [str(VLLM), "serve", "/no/such/model", "--omni"],
                ("/no/such/model", "no such file or folder"),
            ),
            "options-that-exclude-each-other": Case(
                [*serve, "--lora-backend", "distill"], ("--lora-path",), status=2
            ),
            "overrides-that-are-no-json": Case(
                [*serve, "--stage-overrides", '{"0": {'], ("--stage-overrides",), status=2
            ),
            "port-in-use": Case([*serve, "--port", port], (port, "in use")),
            "termination-log-in-no-folder": Case(
                serve,
                ("VLLM_OMNI_HEALTH_TERMINATION_LOG", "/no/such/folder/log", "folder that exists"),
                {"VLLM_OMNI_HEALTH_TERMINATION_LOG": "/no/such/folder/log"},
            ),
            "preflight": Case(
                serve,
                ("host: ", "less than min_free_memory", "preflight=warn"),
                {
                    "VLLM_OMNI_HEALTH_PREFLIGHT": "fail",
                    "VLLM_OMNI_HEALTH_MIN_FREE_MEMORY": "host=99%",
                },
            ),
            "sockets-in-no-folder": Case(
                serve,
                ("VLLM_RPC_BASE_PATH", "/no/such/folder"),
                {"VLLM_RPC_BASE_PATH": "/no/such/folder"},
            ),
            "port-out-of-range": Case([*serve, "--port", "99999"], ("--port 99999",), status=2),
            "unknown-option": Case([*serve, "--no-such-option"], ("--no-such-option",), status=2),
            "unknown-deployment": Case(
                [str(SERVE), "no-such-deployment"], ("no-such-deployment",), status=2
            ),
        }


@pytest.fixture(scope="module")
def results(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """All of them are tried, a few at a time: most of each is importing vLLM."""

    async def try_all() -> dict[str, Result]:
        turn = asyncio.Semaphore(_AT_ONCE)

        async def attempt(name: str, case: Case) -> Result:
            folder = tmp_path_factory.mktemp(name)
            log = folder / "termination.log"
            env = {"VLLM_OMNI_HEALTH_TERMINATION_LOG": str(log)} | case.env
            async with (
                turn,
                running(case.command, url="http://-", folder=folder, env=env) as s,
            ):
                ending = await s.wait_end(_GUARD_S)
                left = await s.wait_processes_gone(5)
                return Result(
                    None if ending is None else ending.status,
                    s.stderr,
                    [member.describe() for member in left],
                    json.loads(log.read_text())["exit_status"] if log.exists() else None,
                )

        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(attempt(name, case)) for name, case in cases.items()}
        return {name: task.result() for name, task in tasks.items()}

    return asyncio.run(try_all())


@pytest.mark.parametrize(
    "name",
    [
        "unknown-setting",
        "wrong-value",
        "wrong-switch",
        "unsupported-upstream",
        "missing-deploy-file",
        "typo-in-deploy-file",
        "override-of-no-stage",
        "no-such-model",
        "options-that-exclude-each-other",
        "port-in-use",
        "termination-log-in-no-folder",
        "sockets-in-no-folder",
        "port-out-of-range",
    ],
)
def test_is_told_in_one_line(cases: dict[str, Case], results: dict[str, Result], name: str) -> None:
    case, result = cases[name], results[name]
    assert result.status == case.status, result.stderr
    ours = [line for line in result.stderr.splitlines() if "vllm serve --omni:" in line]
    assert len(ours) == 1, result.stderr
    for word in case.names:
        assert word in ours[0]
    assert "Traceback" not in result.stderr
    assert result.left == []
    # Where the log is what is wrong, nothing can be in it.
    assert result.noted == (None if name == "termination-log-in-no-folder" else case.status)


@pytest.mark.parametrize(
    "name", ["unknown-option", "overrides-that-are-no-json", "unknown-deployment"]
)
def test_usage_is_status_2(cases: dict[str, Case], results: dict[str, Result], name: str) -> None:
    case, result = cases[name], results[name]
    assert result.status == case.status, result.stderr
    assert all(word in result.stderr for word in case.names)
    assert "Traceback" not in result.stderr
    assert result.left == []
