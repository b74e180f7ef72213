# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Every route of the real application is classified, and the guard treats it so."""

import re
from pathlib import Path
from typing import get_args

import pytest
from real_app import build_app
from vllm.tasks import SupportedTask
from vllm_omni.entrypoints.health.http.routes import (
    RouteKind,
    asks_for_work,
    job_id_of,
    kind_of,
)

PAGE = (Path(__file__).parents[2] / "docs" / "routes.md").read_text()
SECTIONS = {
    "Routes that need stages": RouteKind.WORK,
    "Routes that tell of a job": RouteKind.JOB,
    "Routes that need no stage": RouteKind.FREE,
}
ROUTE = re.compile(r"`([A-Z]+) (/\S*)`")


def documented():
    """(method, path) → kind, by the page; each route once."""
    found = {}
    for section in PAGE.split("\n## ")[1:]:
        kind = SECTIONS.get(section.splitlines()[0])
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        for route in ROUTE.findall("\n".join(rows)):
            assert route not in found, f"{route} is there twice"
            found[route] = kind
    return found


def every_task():
    return get_args(SupportedTask)


@pytest.fixture(scope="module")
def routes():
    """(method, path) of everything that upstream can serve."""
    found = set()
    for route in build_app(every_task()).routes:
        if type(route).__name__ == "Mount":
            continue
        methods = getattr(route, "methods", None) or {"WEBSOCKET"}
        found |= {(method, route.path) for method in methods - {"HEAD"}}
    return found


def test_every_route_is_classified(routes):
    unknown = routes - documented().keys()
    assert not unknown, f"say in docs/routes.md how these answer at a fault: {sorted(unknown)}"


def test_nothing_is_classified_that_is_not_there(routes):
    assert documented().keys() - routes == set()


@pytest.mark.parametrize(("route", "kind"), documented().items(), ids=str)
def test_the_guard_treats_a_route_as_the_page_says(route, kind):
    method, path = route
    if method == "WEBSOCKET":
        assert kind is RouteKind.WORK
    else:
        assert kind_of(method, re.sub(r"{\w+}", "some-id", path)) is kind


def test_a_route_that_nobody_has_looked_at_counts_as_work():
    assert kind_of("POST", "/v2/whatever") is RouteKind.WORK


def test_what_ends_requests_or_serves_operators_is_not_one_too_many():
    """``--max-num-queued-reqs`` must not keep anybody from making room."""
    limited = {
        path
        for (method, path), kind in documented().items()
        if kind is RouteKind.WORK and method != "WEBSOCKET" and asks_for_work(path)
    }
    assert {path.split("/")[1] for path in limited} == {
        "v1",
        "generative_scoring",
        "inference",
        "invocations",
    }
    assert not any(
        "omni" in path or path.endswith(("cancel", "close", "reset")) for path in limited
    )
    assert asks_for_work("/v1/realtime/sessions/some-id/step")


def test_the_id_of_a_job():
    assert job_id_of("/v1/videos/video_gen_1/content") == "video_gen_1"
    assert job_id_of("/v1/responses/resp_1") == "resp_1"
    assert job_id_of("/v1/videos") is None
