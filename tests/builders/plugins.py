"""SGLang plugins that break something in a server's processes."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

from scripts.harness.server import environment


def saboteur(folder: Path, code: str) -> dict[str, str]:
    """Returns an environment with another SGLang plugin, which runs ``code`` in each process before ours registers. SGLang
    takes plugins in ``sys.path`` order, so run it in ``folder``, which precedes whatever lies beside these tests."""
    (folder / "saboteur.py").write_text(f"def register():\n    import multiprocessing, sys\n{textwrap.indent(code, '    ')}\n")
    info = folder / "saboteur-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: saboteur\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nsaboteur = saboteur:register\n")
    env = environment({})
    return {**env, "PYTHONPATH": f"{folder}{os.pathsep}{env['PYTHONPATH']}"}


IN_SCHEDULER = "if multiprocessing.parent_process() is not None and 'sglang.srt.managers.scheduler' in sys.modules:\n"
