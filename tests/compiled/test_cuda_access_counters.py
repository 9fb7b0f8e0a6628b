"""Whether the driver's access counters migrate pages, as its parameter and the stand-in driver say."""

from __future__ import annotations

from pathlib import Path

import pytest
from standin.run import Standin

PROGRAM = """
    from pathlib import Path
    from sglang_uvm_offload.cuda import access_counters
    print(json.dumps(access_counters.warning([0], Path({folder!r}))))
"""
COHERENT = "attribute_100"


@pytest.mark.parametrize(
    ("setting", "coherent", "told"),
    [("-1", 1, True), ("-1", 0, False), ("0", 1, False), ("1", 0, True), ("1", 1, True), (None, 1, False), ("Y", 1, False)],
)
def test_the_setting_is_named_where_the_counters_migrate(
    standin: Standin, tmp_path: Path, setting: str | None, coherent: int, told: bool
) -> None:
    parameters = tmp_path / "module/nvidia_uvm/parameters"
    parameters.mkdir(parents=True)
    if setting is not None:
        (parameters / "uvm_perf_access_counter_migration_enable").write_text(setting + "\n")
    said = standin.run(PROGRAM.format(folder=str(tmp_path)), **{COHERENT: coherent}).said
    assert (said is not None) == told
    if told:
        assert f"uvm_perf_access_counter_migration_enable is {setting})" in said
        assert "options nvidia-uvm uvm_perf_access_counter_migration_enable=0" in said
