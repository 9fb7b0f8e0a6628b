"""What a scheduler does between steps: what fails there is told, and ends no server."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from builders.managers import Rank, config
from prometheus_client import CollectorRegistry
from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.runtime_context import get_parallel

from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.plugin.operate import rank_files
from sglang_uvm_offload.plugin.operate.actions import END, Action
from sglang_uvm_offload.plugin.operate.metrics import Metrics
from sglang_uvm_offload.plugin.operate.rank_files import RankFiles
from sglang_uvm_offload.plugin.rank.chores import Chores
from sglang_uvm_offload.plugin.rank.operating_hooks import OperatingHooks
from sglang_uvm_offload.plugin.rank.state import RankState
from sglang_uvm_offload.residency.status import RankId, RankStatus

pytestmark = pytest.mark.sglang

LABELS = {"model_name": "m", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}


class Short:
    """Raises while there is too little of something."""

    def __init__(self):
        self.error: BaseException | None = None
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.error is not None:
            raise self.error


class Serving:
    """The hooks of a rank that serves, on a clock of its own."""

    def __init__(self, **flags):
        self.now = 100.0
        cfg = config(resident_selection="first_n", **flags)
        self.rank = RankState(cfg)
        served = Rank(cfg, clock=lambda: self.now)
        self.rank.manager = served.manager
        self.step = lambda: served.step([[0, 7], [1, 7]])
        self.faults, self.snapshot = Short(), Short()
        self.rank.savers.append(Saver("profile", self.snapshot, lambda: self.now))
        self.hooks = OperatingHooks(self.rank)
        self.hooks.chores = Chores(lambda: self.now)
        self.registry = CollectorRegistry()
        self.hooks.metrics = Metrics(
            self.rank.manager, LABELS, lambda: self.faults() or {"moving": False}, self.rank.savers, self.registry
        )

    def sample(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"sglang:expert_offload_{name}", LABELS)


@pytest.mark.parametrize("moment", ["after_batch", "after_idle"])
@pytest.mark.parametrize("error", [MemoryError("no room"), OSError(28, "No space left on device"), RuntimeError("can't start")])
def test_what_fails_between_steps_is_logged_once_and_tried_again(caplog, moment, error):
    serving = Serving()
    serving.faults.error = serving.snapshot.error = error
    serving.step()
    serving.now += 1000
    for _ in range(5):
        getattr(serving.hooks, moment)(None, None)
    assert caplog.text.count("publishing metrics failed") == 1
    assert caplog.text.count("the profile could not be saved") == 1
    assert (serving.faults.calls, serving.snapshot.calls) == (1, 1)
    serving.faults.error = serving.snapshot.error = None
    serving.now += 1000
    serving.hooks.after_idle(None, None)
    assert (serving.faults.calls, serving.snapshot.calls) == (2, 2)
    assert serving.sample("offloaded_bytes") > 0
    serving.hooks.metrics.publish()
    assert serving.registry.get_sample_value("sglang:expert_offload_save_failures_total", {**LABELS, "of": "profile"}) == 1


def test_an_exit_of_the_process_passes(monkeypatch):
    serving = Serving()
    serving.faults.error = SystemExit(3)
    serving.step()
    with pytest.raises(SystemExit):
        serving.hooks.after_batch(None, None)


def test_a_status_that_cannot_be_made_is_left_out(monkeypatch, caplog):
    serving = Serving()
    reason = Short()
    reason.error = MemoryError("no room")
    monkeypatch.setattr(serving.hooks, "_status", reason)
    answer = SimpleNamespace(internal_state={"sglang": 1})
    shown = serving.hooks.after_internal_state(answer, None).internal_state
    assert shown == {"sglang": 1, "expert_offload_resident_selection": "first_n"}
    assert "the status failed: MemoryError: no room" in caplog.text


def written(serving: Serving) -> list[RankStatus | None]:
    """What the rank leaves for a request of its status."""
    with get_parallel().override(tp_rank=3, pp_rank=2, dp_rank=1), RankFiles() as files:
        done = serving.hooks.around_set_internal_state(None, None, SimpleNamespace(server_args=files.message()))
        assert done.updated
        return files.read()


def test_a_rank_answers_a_request_for_its_status_without_waiting_for_the_device(monkeypatch):
    serving = Serving()
    serving.step()
    monkeypatch.setattr(serving.rank.manager.ledger, "catch_up", pytest.fail)
    (status,) = written(serving)
    assert (status.rank, status.tokens, status.hit_rate) == (RankId(dp=1, pp=2, tp=3), 2, 0.5)


def test_a_rank_that_cannot_make_its_status_says_so_and_serves_on(monkeypatch, caplog):
    serving = Serving()
    reason = Short()
    reason.error = MemoryError("no room")
    monkeypatch.setattr(serving.hooks, "_status", reason)
    assert written(serving) == [None]
    assert written(serving) == [None], "also while it is not tried again"
    assert "the status failed: MemoryError: no room" in caplog.text


def test_a_status_that_cannot_be_written_ends_no_server(monkeypatch, caplog):
    write = Short()
    write.error = OSError(28, "No space left on device")
    monkeypatch.setattr(rank_files, "write", write)
    assert written(Serving()) == []
    assert "writing the status failed: OSError" in caplog.text


def minutes_logged(serving: Serving, caplog) -> list[str]:
    """The lines about minutes, of rank 3, over a minute of steps, an idle one, and one that begins with steps."""
    serving.rank.manager.begin_serving()
    with get_parallel().override(tp_rank=3), caplog.at_level(logging.INFO):
        for _ in range(125):
            serving.now += 0.5
            serving.step()
            serving.hooks.after_batch(None, None)
        for _ in range(300):
            serving.now += 0.5
            serving.hooks.after_idle(None, None)
    return [record.getMessage() for record in caplog.records if "in the last" in record.getMessage()]


def test_continuous_logs_a_line_for_each_minute_with_steps(caplog):
    lines = minutes_logged(Serving(adapt="continuous"), caplog)
    assert [line.partition(" steps")[0] for line in lines] == [
        "Expert offload, rank 3: in the last 60 s, 119",  # those whose counts had arrived
        "Expert offload, rank 3: in the last 60 s, 6",
    ]


@pytest.mark.parametrize("adapt", ["off", "warmup"])
def test_no_other_mode_logs_a_line_a_minute(caplog, adapt):
    assert minutes_logged(Serving(adapt=adapt), caplog) == []


def test_a_line_that_cannot_be_made_ends_no_server(caplog):
    serving = Serving(adapt="continuous")
    serving.rank.manager.begin_serving()
    serving.rank.manager.minutes._host_free = host_free = Short()
    host_free.error = OSError(24, "Too many open files")
    serving.step()
    serving.hooks.after_idle(None, None)
    serving.now += 60
    serving.hooks.after_idle(None, None)
    assert "logging the last minute failed: OSError: [Errno 24]" in caplog.text


def test_a_server_that_is_told_to_end_saves_at_once_and_its_log_names_no_operator(caplog):
    caplog.set_level("INFO")
    serving = Serving()
    answer = serving.hooks.around_set_internal_state(None, None, SetInternalStateReq(server_args=END))
    assert answer.updated
    assert serving.snapshot.calls == 1
    assert [record.getMessage() for record in caplog.records] == ["Expert offload: server ends: saving the profile"]
    assert Action.of(END) is None
