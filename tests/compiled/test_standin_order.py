"""The order that ``standin.order`` reads out of a log, on logs written by hand."""

from __future__ import annotations

from typing import Any

import pytest
from standin.order import Order

EVENT = "0xe"


def called(name: str, **fields: Any) -> dict[str, Any]:
    return {"pid": 1, "call": name, "result": 0, "thread": 1} | fields


def work(stream: str, **fields: Any) -> dict[str, Any]:
    return called("cudaMemcpyAsync", stream=stream, graph=0, waits=False, **fields)


def record(stream: str, event: str = EVENT, **fields: Any) -> dict[str, Any]:
    return called("cudaEventRecord", event=event, stream=stream, graph=0, **fields)


def wait(stream: str, event: str = EVENT) -> dict[str, Any]:
    return called("cudaStreamWaitEvent", event=event, stream=stream, graph=0)


def ordered(calls: list[dict[str, Any]], first: dict[str, Any], second: dict[str, Any]) -> bool:
    order = Order(calls)
    assert not order.happens_before(second, first)
    return order.happens_before(first, second)


def test_a_stream_runs_its_work_in_order():
    first, second = work("a"), work("a")
    assert ordered([first, second], first, second)


def test_two_streams_without_events_are_not_ordered():
    first, second = work("a"), work("b")
    assert not ordered([first, second], first, second)


def test_work_is_not_before_itself():
    it = work("a")
    assert not Order([it]).happens_before(it, it)


def test_a_wait_orders_what_was_recorded_before_what_follows_it():
    recorded, later, earlier, waiting = work("a"), work("a"), work("b"), work("b")
    calls = [recorded, record("a"), later, earlier, wait("b"), waiting]
    assert ordered(calls, recorded, waiting)
    assert not ordered(calls, later, waiting)
    assert not ordered(calls, recorded, earlier)
    assert not ordered(calls, waiting, later)


def test_a_wait_is_for_the_latest_record_before_it():
    first, second, third, waiting = work("a"), work("a"), work("a"), work("b")
    calls = [first, record("a"), second, record("a"), wait("b"), third, record("a"), waiting]
    assert ordered(calls, second, waiting)
    assert not ordered(calls, third, waiting)


def test_an_event_recorded_on_another_stream_is_of_that_stream_only():
    first, second, waiting = work("a"), work("c"), work("b")
    calls = [first, record("a"), second, record("c"), wait("b"), waiting]
    assert ordered(calls, second, waiting)
    assert not ordered(calls, first, waiting)


def test_a_wait_before_any_record_does_nothing():
    first, waiting = work("a"), work("b")
    assert not ordered([first, wait("b"), record("a"), waiting], first, waiting)


def test_order_passes_through_a_third_stream():
    first, last = work("a"), work("c")
    calls = [first, record("a", "0x1"), wait("b", "0x1"), record("b", "0x2"), wait("c", "0x2"), last]
    assert ordered(calls, first, last)
    assert not ordered([call for call in calls if call != wait("b", "0x1")], first, last)


@pytest.mark.parametrize(
    "waited",
    [
        called("cudaStreamSynchronize", stream="a"),
        called("cudaStreamQuery", stream="a"),
        called("cudaDeviceSynchronize"),
        called("cudaEventSynchronize", event=EVENT),
        called("cudaEventQuery", event=EVENT),
    ],
    ids=lambda call: call["call"],
)
def test_what_the_host_has_waited_for_is_before_what_it_submits_next(waited):
    first, submitted_before, last = work("a"), work("b"), work("c")
    calls = [first, record("a"), submitted_before, waited, last]
    assert ordered(calls, first, last)
    assert not ordered(calls, first, submitted_before)
    waited_by_another = [call | {"thread": 2} if call is waited else call for call in calls]
    assert not ordered(waited_by_another, first, last)
    failed = [call | {"result": 600} if call is waited else call for call in calls]
    assert not ordered(failed, first, last)


def test_an_event_and_a_stream_are_waited_for_as_they_were():
    first, second, last = work("a"), work("a"), work("b")
    calls = [first, record("a"), second, called("cudaEventSynchronize", event=EVENT), last]
    assert ordered(calls, first, last)
    assert not ordered(calls, second, last)
    other = [first, called("cudaStreamSynchronize", stream="c"), last]
    assert not ordered(other, first, last)


def test_what_is_recorded_knows_what_the_host_has_waited_for():
    first, last = work("a"), work("c")
    calls = [first, called("cudaStreamSynchronize", stream="a"), record("b"), wait("c") | {"thread": 2}, last | {"thread": 2}]
    assert ordered(calls, first, calls[-1])


def test_a_copy_that_the_call_waits_for_is_before_what_is_submitted_next():
    copy, last = work("a") | {"waits": True}, work("b")
    assert ordered([copy, last], copy, last)


def test_a_graph_is_one_operation_and_its_nodes_are_none():
    node = called("cudaLaunchKernel", kernel="k", stream="a", graph=1)
    launch, last = called("cudaGraphLaunch", graph=1, nodes=1, stream="a"), work("b")
    calls = [node, record("a") | {"graph": 1}, launch, wait("b"), last]
    assert not ordered(calls, launch, last)  # the event is the capture's
    assert ordered([node, launch, record("a"), wait("b"), last], launch, last)
    with pytest.raises(ValueError, match="captured"):
        Order(calls).happens_before(node, last)


def test_calls_of_two_processes_have_no_order():
    with pytest.raises(ValueError, match="several processes"):
        Order([work("a"), work("a", pid=2)])
