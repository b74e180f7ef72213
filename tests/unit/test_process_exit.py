# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A process ends its process groups in time, whatever became of the other ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_omni.engine.health import process_exit

from vllm_omni_health.drills.ports import reserved_port

_GUARD_S = 60.0


class Rank:
    """A real gloo rank in a process of its own."""

    def __init__(self, rank: int, port: int) -> None:
        program = Path(__file__).with_name("gloo_rank.py")
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(rank), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        return line or f"nothing: {self.errors()}"

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def ask(self, command: str) -> str:
        self.tell(command)
        return self.answer()

    def status(self) -> int:
        return self.process.wait(_GUARD_S)

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


@pytest.fixture
def ranks() -> Iterator[tuple[Rank, Rank]]:
    with reserved_port() as port:
        pair = Rank(0, port), Rank(1, port)
        try:
            for rank in pair:
                assert rank.answer() == "ready"
            yield pair
        finally:
            for rank in pair:
                rank.process.kill()
                rank.process.communicate()


@pytest.mark.timeout(_GUARD_S)
def test_all_ranks_together_destroy_their_groups(ranks: tuple[Rank, Rank]) -> None:
    for rank in ranks:
        assert rank.ask("destroy") == "True"
        assert rank.ask("initialized") == "False"
        rank.tell("leave")
        assert rank.status() == 0
        assert "destroy_process_group" not in rank.errors()


@pytest.mark.timeout(_GUARD_S)
@pytest.mark.parametrize("loss", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_a_peer_that_is_gone_is_not_waited_for(
    ranks: tuple[Rank, Rank], loss: signal.Signals, end: str
) -> None:
    rank, peer = ranks
    assert rank.ask("collective") == "waiting"
    peer.process.send_signal(loss)
    assert rank.ask(end) in ("True", "False")
    assert rank.ask("initialized") == "False"
    rank.tell("leave")
    assert rank.status() == 0


@pytest.mark.timeout(_GUARD_S)
def test_groups_that_cannot_be_destroyed_are_aborted(ranks: tuple[Rank, Rank]) -> None:
    # As ncclCommDestroy does when a peer is gone.
    rank, _ = ranks
    assert rank.ask("destroy-for-ever") == "False"
    assert rank.ask("initialized") == "False"


@pytest.mark.timeout(_GUARD_S)
def test_a_clean_up_that_never_ends_does_not_keep_the_process(ranks: tuple[Rank, Rank]) -> None:
    rank, _ = ranks
    rank.tell("clean-up-for-ever")
    assert rank.status() == 1


def test_a_clean_up_that_fails_after_a_fault_is_no_error() -> None:
    with process_exit.leaving_in_time(failed=True):
        raise ValueError("the group is gone")


def test_a_clean_up_that_fails_otherwise_is_one() -> None:
    with pytest.raises(ValueError, match="mine"), process_exit.leaving_in_time(failed=False):
        raise ValueError("mine")
