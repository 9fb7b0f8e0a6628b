"""What ends a server or an engine: the ranks save before SGLang ends them, and nothing waits for ranks that hang."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace

import pytest
import uvicorn

from sglang_uvm_offload.plugin.operate import all_ranks, end_of_serving
from sglang_uvm_offload.plugin.operate.actions import END

pytestmark = pytest.mark.sglang


class Manager:
    """Stands for SGLang's tokenizer manager: ``told`` once the ranks have the message that the server ends. With ``hangs``, no
    rank answers."""

    def __init__(self, hangs=False):
        self.told, self.messages, self._hangs = asyncio.Event(), 0, hangs

    async def set_internal_state(self, request):
        assert request.server_args == END
        self.told.set()
        self.messages += 1
        await asyncio.sleep(60 if self._hangs else 0)


class Server(uvicorn.Server):
    """Adds to ``events`` when SIGINT stops it."""

    def __init__(self, events):
        super().__init__(uvicorn.Config(app=None))
        self.events = events

    def handle_exit(self, number, frame):
        self.events.append("stop")


@pytest.fixture
def events(monkeypatch):
    """What happened, in order. Saving takes two reads of the status."""
    happened = []
    saves = [SimpleNamespace(under_way=True)]

    async def status_of(manager):
        happened.append("saving" if saves[0].under_way else "saved")
        status = SimpleNamespace(ranks=[SimpleNamespace(saves=[SimpleNamespace(under_way=saves[0].under_way)])])
        saves[0].under_way = False
        return status

    monkeypatch.setattr(all_ranks, "status_of", status_of)
    monkeypatch.setattr(end_of_serving, "kill_process_tree", lambda pid, include_parent: happened.append("kill ranks"))
    return happened


@pytest.fixture
def on_interrupt():
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


async def until(done):
    async def wait():
        while not done():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 60)


def test_ctrl_c_stops_the_server_once_all_is_saved(events, on_interrupt):
    async def serve():
        on_interrupt(Server(events).handle_exit)
        end_of_serving._End().after_init(None, None, Manager())
        signal.raise_signal(signal.SIGINT)
        await until(lambda: "stop" in events)

    asyncio.run(serve())
    assert events == ["saving", "saved", "stop"]


def test_a_second_ctrl_c_waits_for_nothing(events, on_interrupt, monkeypatch):
    monkeypatch.setattr(end_of_serving, "LAST_SECONDS", 600)

    async def serve():
        on_interrupt(Server(events).handle_exit)
        manager = Manager(hangs=True)
        end_of_serving._End().after_init(None, None, manager)
        signal.raise_signal(signal.SIGINT)
        await manager.told.wait()
        assert events == []
        signal.raise_signal(signal.SIGINT)
        assert events == ["stop"]
        await until(lambda: len(events) == 2)

    asyncio.run(serve())
    assert events == ["stop", "stop"], "uvicorn waits for no connection after the second"


def test_ranks_that_hang_do_not_hang_the_end(events, on_interrupt, monkeypatch, caplog):
    async def serve():
        on_interrupt(Server(events).handle_exit)
        end_of_serving._End().after_init(None, None, Manager(hangs=True))
        signal.raise_signal(signal.SIGINT)
        await until(lambda: events)

    monkeypatch.setattr(end_of_serving, "LAST_SECONDS", 0.1)
    asyncio.run(serve())
    assert events == ["stop"]
    assert "saving at the end takes more than 0.1 s; the server ends without it" in caplog.text


def test_a_process_that_dies_by_the_signal_ends_the_server_after_the_save(events):
    async def serve():
        end, manager = end_of_serving._End(), Manager()
        for _ in range(2):
            end.after_sigterm(None, SimpleNamespace(tokenizer_manager=manager))
        end.around_sigquit(lambda: events.append("quit"))
        assert events == []
        await until(lambda: "quit" in events)
        end.around_sigquit(lambda: events.append("quit again"))
        await until(lambda: "quit again" in events)
        assert manager.messages == 1

    asyncio.run(serve())
    assert events == ["saving", "saved", "kill ranks", "quit", "kill ranks", "quit again"]


def test_a_rank_that_cannot_be_killed_does_not_keep_the_server(events, monkeypatch):
    def fail(pid, include_parent):
        raise RuntimeError("a process is still alive")

    async def serve():
        end = end_of_serving._End()
        end.after_sigterm(None, SimpleNamespace(tokenizer_manager=Manager()))
        end.around_sigquit(lambda: events.append("quit"))
        await until(lambda: "quit" in events)

    monkeypatch.setattr(end_of_serving, "kill_process_tree", fail)
    asyncio.run(serve())
    assert events == ["saving", "saved", "quit"]


def test_a_save_that_fails_ends_the_server_and_is_logged(events, monkeypatch, caplog):
    async def fail(manager):
        raise all_ranks.Unanswered("no rank")

    async def serve():
        end = end_of_serving._End()
        end.after_sigterm(None, SimpleNamespace(tokenizer_manager=Manager()))
        end.around_sigquit(lambda: events.append("quit"))
        await until(lambda: "quit" in events)

    monkeypatch.setattr(all_ranks, "status_of", fail)
    asyncio.run(serve())
    assert events == ["kill ranks", "quit"]
    assert "could not save at the end: Unanswered: no rank" in caplog.text


def test_a_process_that_dies_while_the_server_serves_is_sglangs(events):
    end_of_serving._End().around_sigquit(lambda: events.append("quit"))
    assert events == ["quit"]


@pytest.fixture
def at_exit(monkeypatch):
    registered = []
    monkeypatch.setattr(end_of_serving.atexit, "register", lambda function, *args: registered.append((function, args)))

    def run():
        while registered:
            function, args = registered.pop()
            function(*args)

    return run


@pytest.fixture
def engine(at_exit):
    """An engine that has answered a request, and its hooks."""
    end, manager, loop = end_of_serving._End(), Manager(), asyncio.new_event_loop()

    async def answer():
        end.after_init(None, None, manager)

    loop.run_until_complete(answer())
    yield SimpleNamespace(tokenizer_manager=manager, loop=loop, end=end)
    loop.close()


def test_an_engine_saves_once_when_it_is_shut_down_before_its_program_ends(engine, events, at_exit, on_interrupt):
    handler = signal.getsignal(signal.SIGINT)
    engine.end.before_shutdown(engine)
    assert events == ["saving", "saved"]
    at_exit()
    engine.end.before_shutdown(engine)
    assert events == ["saving", "saved"]
    assert signal.getsignal(signal.SIGINT) is handler, "Ctrl-C belongs to the program"


def test_an_engine_saves_when_its_program_ends(engine, events, at_exit):
    at_exit()
    assert events == ["saving", "saved"]


def test_an_engine_that_has_not_started_has_nothing_to_save(engine, events):
    engine.end.before_shutdown(SimpleNamespace(tokenizer_manager=None))
    engine.end.before_shutdown(SimpleNamespace(tokenizer_manager=Manager()))
    assert events == []


def test_a_shutdown_inside_the_loop_of_the_engine_says_that_it_saves_nothing(engine, events, caplog):
    async def program():
        engine.end.before_shutdown(engine)

    engine.loop.run_until_complete(program())
    assert events == []
    assert "nothing is saved by an Engine.shutdown() inside" in caplog.text


def test_an_engine_whose_loop_is_closed_ends(engine, events, at_exit):
    engine.loop.close()
    at_exit()
    assert events == []
