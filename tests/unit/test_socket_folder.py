# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The folder of a server's own for socket files, whose names have little room."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import pytest
import zmq
from vllm_omni.entrypoints.health.server import exit as health_exit
from vllm_omni.entrypoints.health.server.arguments import BadInput

VARIABLE = "VLLM_RPC_BASE_PATH"
UUID = "e3657f13-81a7-4fc7-b704-1bc3da511381"


@pytest.fixture(autouse=True)
def _no_folder_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_exit, "_socket_folder", None)


def folder_of_length(parent: Path, length: int) -> Path:
    """A folder whose full name has this many bytes."""
    missing = length - len(os.fsencode(parent)) - 1
    folder = parent / ("d" * missing)
    folder.mkdir()
    return folder


def test_sockets_get_a_folder_that_goes_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "b"
    base.mkdir()
    monkeypatch.setattr(zmq, "IPC_PATH_MAX_LEN", 4096)
    monkeypatch.setenv(VARIABLE, str(base))
    health_exit.make_socket_folder()
    used = Path(os.environ[VARIABLE])
    assert used.parent == base
    (used / UUID).touch()
    health_exit.remove_socket_folder()
    assert list(base.iterdir()) == []


@pytest.mark.parametrize("room", [0, 1])
def test_a_base_that_has_room_for_vllm_alone_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    length = len(os.fsencode(tmp_path)) + 30
    base = folder_of_length(tmp_path, length)
    in_ours = length + len("/vllm-omni-12345678/") + len(UUID)
    monkeypatch.setattr(zmq, "IPC_PATH_MAX_LEN", in_ours - 1 + room)
    monkeypatch.setenv(VARIABLE, str(base))
    with caplog.at_level(logging.WARNING):
        health_exit.make_socket_folder()
    assert (os.environ[VARIABLE] != str(base)) is bool(room)
    assert (VARIABLE in caplog.text) is not bool(room)
    health_exit.remove_socket_folder()
    assert list(base.iterdir()) == []


def test_no_folder_to_make_it_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    with pytest.raises(BadInput, match=f"{VARIABLE}: .*none: No such file"):
        health_exit.make_socket_folder()


@pytest.mark.parametrize("variable", [VARIABLE, "TMPDIR"])
def test_a_base_in_which_no_socket_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    base = folder_of_length(tmp_path, zmq.IPC_PATH_MAX_LEN - len(UUID))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv(variable, str(base))
    with pytest.raises(BadInput, match=f"^{variable}: sockets cannot be made in {base}: "):
        health_exit.make_socket_folder()
    assert list(base.iterdir()) == []
