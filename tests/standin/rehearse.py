"""Runs sections of the GPU session over the stand-in, including servers, with the packages of a GPU machine
(``scripts/rehearse.sh`` starts it).

A section's log and JSON look as on a GPU, but measure nothing. Tokens pick the same experts in every step, and each step
generates the same token, so answers are equal whatever is wrong. What a rehearsal does show is whether everything that a
section starts reaches its end, and its bytes, moves, streams, slots and graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from standin.build import build, sglang_environment

from benchmarks.serve_client import NOT_RESOLVED
from benchmarks.serve_run import reasons

ROOT = Path(__file__).resolve().parents[2]
FIRST_EXPERTS = "5,3"
"""Experts that tokens pick: none of the first residents, so that experts are read in place, move and fill slots; different ones
in prompts and in decode steps, so that prompts leave some in slots."""
WAITS_FOR_MARLIN = {"modes", "modes:gptq"}
"""Sections and parts that start a server whose kernels take minutes to compile."""
BUILDS = ("marlin_build", "deep_gemm_build")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="rehearse.sh", description="Runs sections of the GPU session, servers too, over a stand-in driver."
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION[:PART]", help="of scripts/gpu_session.sh --list (default: all)")
    parser.add_argument("--out", type=Path, help="folder for logs and results (default: a new one in /tmp)")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="run no section; compile Marlin and DeepGEMM kernels into the folder's caches/",
    )
    wanted = parser.parse_args()
    out = (wanted.out or Path(tempfile.mkdtemp(prefix="rehearsal-"))).absolute()
    variables = os.environ | environment(out)
    variables["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]  # DeepGEMM's folder may be there
    if wanted.compile:
        return int(any(build_kernels(each, variables) for each in BUILDS))
    known = listed(variables)
    if unknown := [name for name in wanted.sections if name.partition(":")[0] not in known]:
        parser.error(f"no section {', '.join(unknown)}: there are {', '.join(known)}")
    sections = wanted.sections or known
    if WAITS_FOR_MARLIN & {*sections} and (code := build_kernels(BUILDS[0], variables)):
        return code
    failed = [name for name in sections if not rehearse(name, out / "results", variables)]
    print(f"{len(sections) - len(failed)} of {len(sections)} sections are good; logs and JSON: {out / 'results'}")
    return 1 if failed else 0


def environment(out: Path) -> dict[str, str]:
    """Returns the variables for everything that a section starts. What it compiles stays in ``out`` for the next rehearsal."""
    library = build(out / "cuda")
    return sglang_environment(library.parent, Path(os.devnull), out / "caches") | {
        "STANDIN_FIRST_EXPERT": FIRST_EXPERTS,
        "PYTHON": sys.executable,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        **{"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
    }


def build_kernels(program: str, variables: dict[str, str]) -> int:
    print(f"{program}: compiling for minutes ...", flush=True)
    return subprocess.run([sys.executable, "-m", f"benchmarks.gpu.{program}"], env=variables).returncode


def listed(variables: dict[str, str]) -> list[str]:
    listed = subprocess.run([*session(), "--list"], env=variables, capture_output=True, text=True, check=True).stdout
    return [line.split(":")[0] for line in listed.splitlines() if not line.startswith(" ")]


def session() -> list[str]:
    return ["bash", str(ROOT / "scripts" / "gpu_session.sh")]


def rehearse(section: str, results: Path, variables: dict[str, str]) -> bool:
    """Runs a section. Returns whether it is complete and every server that it started has served."""
    started = time.monotonic()
    done = subprocess.run([*session(), "--again", "--out", str(results), section], env=variables).returncode == 0
    record = results / f"{section.partition(':')[0]}.json"
    failed = failures(json.loads(record.read_text())) if record.exists() else []
    for failure in failed:
        print(f"== {section}: {failure}")
    good = done and not failed
    print(f"== rehearsed {section}: {'good' if good else 'NOT good'}, {time.monotonic() - started:.0f} s", flush=True)
    return good


def failures(record: dict[str, Any]) -> list[str]:
    """Lists the errors of servers and of their requests, because a section is complete despite a peer's failure. A time that
    noise hides is no error here, where no kernel computes."""
    cells = [row["cell"] for part in record["parts"].values() for row in part["rows"] if row["row"] == "cell"]
    started = [cell for cell in cells if "flags" in cell]
    return [
        f"{cell['contender']}: {error}" for cell in started for error in reasons(cell) if not error.startswith(NOT_RESOLVED)
    ]


if __name__ == "__main__":
    sys.exit(main())
