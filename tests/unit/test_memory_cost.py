"""Admission by cost: estimates from bodies, learnt from peaks; no wrong refusal for good."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from vllm_omni.entrypoints.health.http.request_cost import cost_of
from vllm_omni.health.memory.cost import Admission, Cost, Ticket
from vllm_omni.health.memory.view import DeviceRow

GIB = 1 << 30
IDLE = 40 * GIB
TOTAL = 80 * GIB
FLOOR = 2 * GIB
PER_PIXEL = 5_000
"""Bytes that the server of these tests really takes for a pixel."""


def pixels(side: int, frames: int = 1) -> Cost:
    return Cost("pixels", float(side * side * frames))


class FakeDevice:
    """A device whose user keeps what it once took, as torch's allocator does."""

    def __init__(self, device: str = "gpu:0") -> None:
        self.device = device
        self.used = IDLE

    def run(self, *costs: Cost) -> None:
        """Carry these out at the same time."""
        need = sum(int(cost.units * PER_PIXEL) for cost in costs)
        self.used = max(self.used, IDLE + need)

    def row(self, **fields: Any) -> DeviceRow:
        row = {"service": self.used, "used": self.used, "free": TOTAL - self.used, "floor": FLOOR}
        return DeviceRow(device=self.device, total=TOTAL, **{**row, **fields})


@pytest.fixture
def admission() -> Admission:
    return Admission()


@pytest.fixture
def device(admission: Admission) -> FakeDevice:
    device = FakeDevice()
    admission.observe([device.row()])
    return device


def admit(admission: Admission, cost: Cost) -> Ticket:
    ticket = admission.enter(cost)
    assert ticket is not None
    return ticket


def carry_out(admission: Admission, device: FakeDevice, *costs: Cost) -> None:
    tickets = [admit(admission, cost) for cost in costs]
    device.run(*costs)
    for ticket in tickets:
        admission.leave(ticket)
    admission.observe([device.row()])


def learnt(admission: Admission) -> dict[str, Any]:
    (model,) = admission.body()["learnt"]
    return model


def test_it_learns_what_a_unit_takes(admission: Admission, device: FakeDevice) -> None:
    carry_out(admission, device, pixels(1024))
    assert learnt(admission)["bytes_per_unit"] == pytest.approx(PER_PIXEL, rel=0.01)
    carry_out(admission, device, pixels(2048))
    model = learnt(admission)
    assert (model["device"], model["kind"]) == ("gpu:0", "pixels")
    assert model["bytes_per_unit"] == pytest.approx(PER_PIXEL, rel=0.01)
    # Nothing turned out wrong, so there is no error to tell.
    assert model["error_pct"] is None or model["error_pct"] < 1


def test_what_fits_is_admitted_and_what_does_not_is_refused(
    admission: Admission, device: FakeDevice
) -> None:
    carry_out(admission, device, pixels(1024))
    # 38 GiB above the floor: seven requests of 4.9 GiB each, and no eighth.
    big = pixels(1024)
    cost_bytes = big.units * PER_PIXEL
    fits = int((TOTAL - IDLE - FLOOR) / cost_bytes)
    tickets = [admit(admission, big) for _ in range(fits)]
    assert admission.enter(big) is None
    assert admission.body()["refused"] == 1
    # A small one still fits.
    tickets.append(admit(admission, pixels(64)))
    admission.leave(tickets[0])
    admission.leave(tickets[0])
    admit(admission, pixels(1000))
    device.run(*[big] * (fits - 1), pixels(64), pixels(1000))
    assert TOTAL - device.used >= FLOOR


def test_nothing_in_flight_means_that_anything_is_admitted(
    admission: Admission, device: FakeDevice
) -> None:
    carry_out(admission, device, pixels(512))
    admit(admission, pixels(10_000))
    assert admission.enter(pixels(10_000)) is None


def test_what_is_kept_can_be_used_again(admission: Admission, device: FakeDevice) -> None:
    carry_out(admission, device, pixels(2500))
    assert TOTAL - device.used < pixels(2500).units * PER_PIXEL
    small = admit(admission, pixels(16))
    # Free memory alone would not be enough.
    admit(admission, pixels(2500))
    admission.leave(small)


def test_an_estimate_that_was_too_high_comes_down_and_its_error_is_told(
    admission: Admission, device: FakeDevice
) -> None:
    first = admit(admission, pixels(512))
    # Something else takes as much as a large request would.
    device.used += 10 * GIB
    admission.observe([device.row()])
    admission.leave(first)
    admission.observe([device.row()])
    high = learnt(admission)["bytes_per_unit"]
    assert high > 5 * PER_PIXEL
    carry_out(admission, device, pixels(1200))
    model = learnt(admission)
    assert model["bytes_per_unit"] < high / 2
    assert model["error_pct"] > 30


def test_requests_that_wait_for_their_turn_do_not_look_cheap(
    admission: Admission, device: FakeDevice
) -> None:
    costs = [pixels(512)] * 8
    tickets = [admit(admission, cost) for cost in costs]
    for ticket in tickets:
        device.run(ticket.cost)
        admission.observe([device.row()])
        admission.leave(ticket)
    admission.observe([device.row()])
    carry_out(admission, device, pixels(1024))
    assert learnt(admission)["bytes_per_unit"] == pytest.approx(PER_PIXEL, rel=0.01)


def test_unknown_work_is_admitted(admission: Admission, device: FakeDevice) -> None:
    carry_out(admission, device, pixels(2700))
    admit(admission, pixels(2700))
    admit(admission, Cost("tokens", 1e9))


def test_an_unknown_figure_teaches_nothing(admission: Admission, device: FakeDevice) -> None:
    ticket = admit(admission, pixels(512))
    admission.observe([device.row(service=None, used=None, free=None)])
    admission.leave(ticket)
    assert admission.body()["learnt"] == []


def test_in_any_order_of_requests_memory_suffices_once_it_is_known(
    admission: Admission, device: FakeDevice
) -> None:
    chance = random.Random(7)
    carry_out(admission, device, pixels(1024))
    running: list[Ticket] = []
    refused = 0
    for _ in range(500):
        cost = pixels(chance.randrange(64, 2048))
        ticket = admission.enter(cost)
        refused += ticket is None
        if ticket is not None:
            running.append(ticket)
        device.run(*(one.cost for one in running))
        assert TOTAL - device.used >= 0
        if running and chance.random() < 0.5:
            admission.leave(running.pop(chance.randrange(len(running))))
        admission.observe([device.row()])
    assert refused > 10


# ---- what a body asks for --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "cost"),
    [
        ("/v1/images/generations", {"size": "512x256"}, Cost("pixels", 512 * 256)),
        ("/v1/images/generations", {"size": "512x256", "n": 3}, Cost("pixels", 512 * 256 * 3)),
        ("/v1/images/generations", {"size": "auto"}, Cost("pixels", 1024 * 1024)),
        (
            "/v1/videos",
            {"width": 640, "height": 480, "num_frames": 81},
            Cost("pixels", 640 * 480 * 81),
        ),
        ("/v1/videos", {"size": "640x480", "seconds": "2", "fps": 10}, Cost("pixels", 6144000)),
        (
            "/v1/chat/completions",
            {"messages": [], "extra_body": {"height": 64, "width": 32}},
            Cost("pixels", 64 * 32),
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 50},
            Cost("tokens", 150),
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "x" * 40},
                            {"type": "image_url", "image_url": {"url": "data:..." + "x" * 9999}},
                        ],
                    }
                ],
                "max_completion_tokens": 6,
                "n": 2,
            },
            Cost("tokens", 10 + 1024 + 12),
        ),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 5}, Cost("tokens", 8)),
        ("/v1/audio/speech", {"input": "x" * 8}, Cost("tokens", 2 + 256)),
        ("/v1/embeddings", {"input": "x"}, None),
        ("/v1/images/generations", {"size": 7, "n": "many", "width": -5}, Cost("pixels", 1 << 20)),
        ("/v1/chat/completions", {"messages": 5, "max_tokens": True}, Cost("tokens", 256)),
    ],
)
def test_the_cost_of_a_body(path: str, body: dict[str, Any], cost: Cost | None) -> None:
    assert cost_of(path, json.dumps(body).encode()) == cost


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b'"text"'])
def test_a_body_that_is_not_understood_has_no_cost(body: bytes) -> None:
    assert cost_of("/v1/chat/completions", body) is None
