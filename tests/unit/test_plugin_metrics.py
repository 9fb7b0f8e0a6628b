"""Metrics: what a scrape shows after steps, and when it is brought up to date."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from builders import links
from builders.managers import LAYERS, Rank, config
from prometheus_client import CollectorRegistry

from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.plugin.operate import metrics as metrics_module
from sglang_uvm_offload.plugin.operate.metrics import Metrics

pytestmark = pytest.mark.sglang

LABELS = {"model_name": "m", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}


REGISTRIES: list[CollectorRegistry] = []


@pytest.fixture
def served():
    rank = Rank(config(resident_selection="first_n"))
    REGISTRIES.append(CollectorRegistry())
    return rank, Metrics(rank.manager, LABELS, lambda: {"moving": rank.manager.fault is not None}, [], REGISTRIES[-1])


def sample(name: str, **labels: str) -> float | None:
    """A metric of the last rank served."""
    return REGISTRIES[-1].get_sample_value(f"sglang:expert_offload_{name}", {**LABELS, **labels})


def test_a_scrape_shows_residents_hit_rate_and_bytes_by_group_of_layers(served):
    rank, metrics = served
    rank.step([[0, 7], [1, 7]])
    metrics.publish()
    for group in ("1-1", "2-2", "3-3"):
        assert sample("resident_experts", layers=group) == 3
        assert sample("hit_rate", layers=group) == 0.5
        assert sample("byte_hit_rate", layers=group) == pytest.approx(2 / 3)
        assert sample("zero_copy_bytes_total", layers=group) == PAGE_BYTES
    assert sample("moves_total") == 0


def test_streamed_bytes_are_counted_by_group_of_layers_apart_from_reads_in_place(served):
    rank, metrics = served
    for _ in range(2):
        rank.step([[0, 7], [1, 7]], streams=True)
        rank.manager.ledger.add_streamed(1, 5 * PAGE_BYTES)
        metrics.publish()
    streamed, read = (
        [sample(f"{name}_bytes_total", layers=f"{i}-{i}") for i in (1, 2, 3)] for name in ("streamed", "zero_copy")
    )
    assert streamed == [0, 10 * PAGE_BYTES, 0]
    assert read == [0, 0, 0]
    assert sample("byte_hit_rate", layers="1-1") is None


def test_a_measured_link_is_shown_in_bytes_a_second_and_another_is_not(served):
    rank, metrics = served
    metrics.publish()
    assert sample("link_bytes_per_second", by="scattered") is None
    assert sample("link_expected_bytes_per_second") is None
    rank.manager.link = links.status(expected=51.7, scattered=35.0, engine=52.0)
    metrics.publish()
    assert sample("link_expected_bytes_per_second") == 51.7e9
    shown = {by: sample("link_bytes_per_second", by=by) for by in ("sequential", "scattered", "copied", "engine")}
    assert shown == {"sequential": 51e9, "scattered": 35e9, "copied": 50e9, "engine": 52e9}


def test_what_a_link_should_reach_is_not_shown_where_it_is_unknown(served):
    rank, metrics = served
    rank.manager.link = links.status(expected=0.0)
    metrics.publish()
    assert sample("link_bytes_per_second", by="scattered") == 50e9
    assert sample("link_expected_bytes_per_second") is None


def test_a_move_that_host_ram_has_no_room_for_is_counted(served):
    rank, metrics = served
    metrics.publish()
    assert sample("skipped_moves_total") == 0
    short = replace(rank.manager.memory.info(), host_available=0)
    rank.manager.memory.info = lambda: short
    rank.step([[7, 6, 5]])
    rank.manager.residents.after_warmup(rank.manager.tokens)
    for _ in range(2):
        metrics.publish()
    assert (sample("skipped_moves_total"), sample("moves_total"), sample("fault", of="moving")) == (1, 0, 1)


def test_a_move_that_vram_has_no_room_for_is_none_of_them(served):
    rank, metrics = served
    short = replace(rank.manager.memory.info(), device_free=0)
    rank.manager.memory.info = lambda: short
    (layer, *_) = rank.model.layers
    rank.manager.mover.move([(layer, np.ones_like(layer.resident_extents()))], show=False)
    metrics.publish()
    assert (sample("skipped_moves_total"), sample("fault", of="moving")) == (0, 1)


def test_experts_that_cannot_leave_vram_for_a_sleep_are_counted(served):
    rank, metrics = served
    short = replace(rank.manager.memory.info(), host_available=0)
    rank.manager.memory.info = lambda: short
    rank.manager.sleep()
    metrics.publish()
    assert sample("skipped_moves_total") == 1


def test_free_host_ram_is_shown_while_no_step_runs_too(served, monkeypatch):
    _, metrics = served
    metrics.host_free = lambda: 5 << 30
    metrics.publish()
    assert sample("host_free_bytes") == 5 << 30
    metrics.host_free = lambda: 1 << 20
    metrics.publish_when_idle()
    assert sample("host_free_bytes") == 5 << 30, "published before its time"
    monkeypatch.setattr(metrics_module, "PERIOD_SECONDS", 0.0)
    metrics.publish()
    metrics.host_free = lambda: 2 << 20
    metrics.publish_when_idle()
    assert sample("host_free_bytes") == 2 << 20


def test_evicted_bytes_are_unknown_once_looking_has_failed(served):
    rank, metrics = served
    metrics.publish()
    assert sample("evicted_bytes") is None
    for evicted in (PAGE_BYTES, 0):
        rank.manager.evictions.evicted_bytes = evicted
        metrics.publish()
        assert sample("evicted_bytes") == evicted
    rank.manager.evictions.evicted_bytes = None
    metrics.publish()
    assert math.isnan(sample("evicted_bytes"))


def test_moves_are_counted_and_the_vram_that_they_leave_is_shown(served):
    rank, metrics = served
    metrics.publish()
    assert sample("reclaimable_bytes") == 0
    rank.step([[7, 6, 5]])
    rank.manager.residents.after_warmup(rank.manager.tokens)
    metrics.publish()
    assert sample("moves_total") == 3 * LAYERS
    assert sample("moved_bytes_total") == 2 * 3 * LAYERS * PAGE_BYTES
    assert sample("moving_seconds_total") > 0
    assert sample("reclaimable_bytes") == rank.status()["reclaimable_bytes"] == 3 * LAYERS * PAGE_BYTES


def test_hit_rate_is_that_of_the_time_since_the_last_report(served):
    rank, metrics = served
    rank.step([[7]])
    metrics.publish()
    rank.step([[0]])
    metrics.publish()
    assert sample("hit_rate", layers="1-1") == 1.0


def test_idleness_brings_the_last_steps_out_once(served):
    rank, metrics = served
    metrics.publish()
    rank.step([[0, 7]])
    metrics.publish_if_due()
    assert sample("hit_rate", layers="1-1") is None or sample("hit_rate", layers="1-1") == 0, "published before its time"
    metrics.publish_when_idle()
    assert sample("hit_rate", layers="1-1") == 0.5
    metrics.publish = lambda: pytest.fail("published again though nothing happened")
    metrics.publish_when_idle()


def test_an_operator_sees_bytes_pauses_and_faults(served):
    rank, metrics = served
    metrics.publish()
    assert (sample("paused"), sample("fault", of="moving")) == (0, 0)
    assert sample("resident_bytes") == 3 * 3 * PAGE_BYTES
    assert sample("offloaded_bytes") == 3 * 5 * PAGE_BYTES
    rank.manager.pause()
    rank.manager.mover.failure = "a test"
    metrics.publish()
    assert (sample("paused"), sample("fault", of="moving")) == (1, 1)
    rank.manager.resume()
    metrics.publish()
    assert sample("paused") == 0


def test_failed_saves_are_counted_once_each(served):
    _, metrics = served
    saver = SimpleNamespace(what="profile", failures=0)
    metrics.savers = [saver]
    metrics.publish()
    assert sample("save_failures_total", of="profile") == 0
    saver.failures = 2
    for _ in range(2):
        metrics.publish()
    assert sample("save_failures_total", of="profile") == 2
