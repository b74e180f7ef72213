# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The command for people, machines and pipelines, against a server that says what a test wants."""

from __future__ import annotations

import http.server
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from vllm_omni_health.drills.ports import reserved_port
from vllm_omni_health.memory_tool.gate import Verdict
from vllm_omni_health.memory_tool.table import History, sparkline, table

GIB = 1 << 30
COMMAND = [sys.executable, "-c", "from vllm_omni_health.memory_tool.cli import main; main()"]
_GUARD_S = 60


def figures(percent: float | None = 0.0, **device: Any) -> dict[str, Any]:
    discrepancy = None
    if percent is not None:
        discrepancy = {
            "actual": 51 * GIB,
            "reported": 50 * GIB,
            "overhead": GIB,
            "unaccounted": round(51 * GIB * percent / 100),
            "percent": percent,
            "trend_bytes_per_s": 1 << 20,
            "alarm": percent > 5,
        }
    row = {"device": "gpu:0", "total": 80 * GIB, "used": 60 * GIB, "free": 20 * GIB}
    row |= {"service": 51 * GIB, "others": 9 * GIB, "floor": 2 * GIB, "pressure": False}
    row |= {"discrepancy": discrepancy, "unknown": None, **device}
    stage = {"stage_id": 1, "replica_id": 0, "device": "gpu:0", "used": 51 * GIB}
    stage |= {"reserved": 50 * GIB, "discrepancy": discrepancy}
    return {"time": "2026-12-01T00:00:00.000Z", "devices": [row], "stages": [stage]}


class FakeServer:
    """Memory that grows by ``growth_pct`` with every request, and answers as it is told."""

    def __init__(self) -> None:
        self.percent: float | None = 0.0
        self.growth_pct = 0.0
        self.status = 200
        self.memory_status = 200
        self.posts: list[dict[str, Any]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_args: object) -> None:
                pass

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self.answer(200, {"data": [{"id": "model"}]})
                else:
                    self.answer(outer.memory_status, figures(outer.percent))

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                outer.posts.append(json.loads(self.rfile.read(length)))
                if outer.percent is not None:
                    outer.percent += outer.growth_pct
                self.answer(outer.status, {})

            def answer(self, status: int, body: dict[str, Any]) -> None:
                payload = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=_GUARD_S, check=False
    )


def check(server: FakeServer, *more: str) -> subprocess.CompletedProcess[str]:
    return run("check", "--url", server.url, "--requests", "8", "--for", "0.5", *more)


# ---- the gate --------------------------------------------------------------------------------


def test_a_server_that_keeps_its_memory_passes(server: FakeServer) -> None:
    done = check(server, "--prompt-words", "80", "--max-tokens", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASS")
    assert {post["model"] for post in server.posts} == {"model"}
    words = sorted(post["messages"][0]["content"].count("memory") for post in server.posts)
    assert words == [10, 20, 30, 40, 50, 60, 70, 80]
    assert server.posts[0]["max_tokens"] == 5


@pytest.mark.parametrize(("growth", "status"), [(0.35, 0), (0.4, 1)])
def test_growth_past_the_threshold_fails(server: FakeServer, growth: float, status: int) -> None:
    server.growth_pct = growth
    done = check(server, "--threshold", "3", "--json")
    assert done.returncode == status, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["status"], result["threshold_pct"]) == (status, 3)
    assert result["answers"] == {"200": 8}
    assert {row["passed_threshold"] for row in result["rows"]} == {bool(status)}


def test_growth_that_goes_again_is_within_the_rule() -> None:
    verdict = Verdict(threshold_pct=3, for_s=10)
    for second, percent in enumerate([0, 4, 4, 2, 4, 4, 4]):
        verdict.feed(5.0 * second, figures(percent))
    assert verdict.passed == [("gpu:0", None, None), ("gpu:0", 1, 0)]
    calm = Verdict(threshold_pct=3, for_s=10)
    for second, percent in enumerate([0, 4, 4, 2, 4, 4, 2]):
        calm.feed(5.0 * second, figures(percent))
    assert calm.passed == []
    assert calm.rows()[0]["peak_pct"] == 4


def test_a_request_of_ones_own_is_sent_as_it_is(server: FakeServer, tmp_path: Any) -> None:
    body = tmp_path / "body.json"
    body.write_text('{"prompt": "an image", "size": "512x512"}')
    done = check(server, "--body", str(body), "--path", "/v1/images/generations")
    assert done.returncode == 0, done.stderr
    assert server.posts == [{"prompt": "an image", "size": "512x512"}] * 8


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"percent": None}, "nothing can be compared"),
        ({"status": 503}, "8 requests failed: 8 with 503"),
        ({"memory_status": 404}, "no server with the health layer"),
    ],
)
def test_what_cannot_be_judged_is_status_2(
    server: FakeServer, change: dict[str, Any], told: str
) -> None:
    for name, value in change.items():
        setattr(server, name, value)
    done = check(server)
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["watch", "check"])
def test_no_server_is_one_clear_line(command: str) -> None:
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        done = run(command, "--url", url)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"vllm-omni-memory: no server at {url}")


@pytest.mark.parametrize("content", ["{", "[1]", None])
def test_a_body_that_is_none_is_one_clear_line(
    server: FakeServer, tmp_path: Any, content: str | None
) -> None:
    body = tmp_path / "body.json"
    if content is not None:
        body.write_text(content)
    done = check(server, "--body", str(body))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"--body {body}" in line


# ---- watching --------------------------------------------------------------------------------


def test_lines_for_machines(server: FakeServer) -> None:
    done = run("watch", "--url", server.url, "--json", "--count", "2", "--interval", "0.1")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines == [figures(0.0)] * 2


@pytest.mark.parametrize("json_option", [["--json"], []])
def test_ctrl_c_ends_it(server: FakeServer, json_option: list[str]) -> None:
    command = [*COMMAND, "watch", "--url", server.url, "--interval", "0.1", *json_option]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        if json_option:
            process.stdout.readline()
        else:
            # Into a pipe the table is written once it ends; the server has been asked by then.
            threading.Event().wait(3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=_GUARD_S)
    assert process.returncode == 0, err
    assert b"Traceback" not in err
    assert json_option or b"gpu:0" in out


def test_a_server_that_goes_away_is_a_line_as_well(server: FakeServer) -> None:
    command = [*COMMAND, "watch", "--url", server.url, "--json", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "devices" in json.loads(process.stdout.readline())
        server.memory_status = 502
        while "error" not in json.loads(process.stdout.readline()):
            pass
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=_GUARD_S)
    assert process.returncode == 0


def test_this_machine_without_a_server() -> None:
    done = run("watch", "--local", "--json", "--count", "1")
    assert done.returncode == 0, done.stderr
    assert "host" in {row["device"] for row in json.loads(done.stdout)["devices"]}


def rendered(body: dict[str, Any], *before: dict[str, Any], width: int = 120) -> str:
    history = History()
    for one in (*before, body):
        history.add(one)
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table("http://server", body, history))
    return console.export_text()


def test_the_table_has_devices_and_stages_with_their_history() -> None:
    text = rendered(figures(6.0), figures(0.0), figures(3.0))
    device, stage = (
        next(line for line in text.splitlines() if name in line) for name in ("gpu:0", "stage 1/0")
    )
    for size in ("60.0G", "80.0G", "20.0G", "2.0G", "9.0G", "50.0G", "3.1G", "6.0"):
        assert size in device
    assert "▁" in device
    assert "█" in device
    assert "51.0G" in stage


def test_the_table_fits_into_eighty_columns_and_says_what_is_unknown() -> None:
    text = rendered(figures(6.0), width=80)
    assert "60.0G" in text
    assert "50.0G" in text
    assert "…" not in text, text
    assert max(map(len, text.splitlines())) <= 80
    text = rendered(figures(None, unknown="GPU is lost", used=None))
    assert "unknown" in text
    assert "GPU is lost" in text


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([]) == ""
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([0.0, 50.0, 100.0]) == "▁▅█"
