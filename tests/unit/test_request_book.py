# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""The engine client's requests, each with the call that it was made for."""

import asyncio
from types import SimpleNamespace

from vllm_omni.entrypoints.health.http.call import GuardedCall, set_current_call
from vllm_omni.entrypoints.health.http.request_book import RequestBook
from vllm_omni.health.runtime import HealthRuntime

from vllm_omni_health.settings.model import HealthSettings


def client(**more):
    return SimpleNamespace(request_states={}, **more)


def call():
    return GuardedCall({"type": "http", "headers": []}, None, HealthRuntime(HealthSettings()))


def test_requests_belong_to_the_call_in_whose_context_they_are_made():
    async def scenario():
        book, engine = RequestBook(), client()
        book.keep(engine)
        calls = [call(), call()]

        async def work(one, request_id):
            set_current_call(one)
            # A task of the route's own works for the same call.
            await asyncio.create_task(submit(request_id))

        async def submit(request_id):
            engine.request_states[request_id] = object()

        await asyncio.gather(work(calls[0], "a-1"), work(calls[1], "b-1"), submit("warm-up"))
        assert book.call_of("a-1") is calls[0]
        assert book.call_of("b-1") is calls[1]
        assert book.call_of("warm-up") is None
        assert (calls[0].engine_ids, len(book)) == (["a-1"], 3)
        assert book.at_work(calls[0])
        engine.request_states.pop("a-1")
        assert not book.at_work(calls[0])
        # It is still known which they were.
        assert calls[0].engine_ids == ["a-1"]

    asyncio.run(scenario())


def test_it_stays_upstreams_dict_in_every_way_that_upstream_uses():
    ended = []
    book, engine = RequestBook(on_close=ended.append), client()
    engine.request_states["before"] = 0
    book.keep(engine)
    states = engine.request_states
    assert isinstance(states, dict)
    states["a"] = 1
    states["a"] = 2
    assert (states.get("a"), len(states), list(states.values())) == (2, 2, [0, 2])
    assert states.pop("a", None) == 2
    assert states.pop("a", None) is None
    assert len(ended) == 1
    states["b"] = 1
    del states["b"]
    states["c"] = 1
    states.clear()
    assert (len(ended), len(book), states) == (3, 0, {})


def test_the_client_behind_upstreams_adapter_and_duplex_sessions():
    inner = client(_handles={})
    adapter = SimpleNamespace(_wrapped=inner)
    book = RequestBook()
    book.keep(adapter)
    inner._handles["duplex-1"] = object()
    inner.request_states["r"] = object()
    assert len(book) == 2
    inner._handles.clear()
    assert len(book) == 1
