# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Where a stream of events ends, by the events that upstream's routes end theirs with."""

import pytest
from vllm_omni.entrypoints.health.http.event_streams import before_the_end

PIECE = b'data: {"choices": [{"delta": {"content": "an error: it failed"}}], "error": null}\n\n'

ENDS = [
    b"data: [DONE]\n\n",
    b'data: {"error": {"message": "x", "code": 500}}\n\n',
    b'event: speech.audio.error\ndata: {"type": "speech.audio.error", "error": {}}\n\n',
    b'event: error\ndata: {"type": "error", "message": "x"}\n\n',
    b'event: response.failed\ndata: {"type": "response.failed"}\n\n',
]


@pytest.mark.parametrize("end", ENDS)
def test_what_stands_before_the_end_is_kept(end):
    assert before_the_end(end) == b""
    assert before_the_end(PIECE + PIECE + end) == PIECE + PIECE
    assert before_the_end(PIECE + end + b"data: [DONE]\n\n") == PIECE


@pytest.mark.parametrize(
    "chunk",
    [b"", PIECE, PIECE * 3, b": comment\n\n", b"data: error, and no JSON\n\n", b'data: ["error"]'],
)
def test_pieces_of_an_answer_are_no_end(chunk):
    assert before_the_end(chunk) is None
