"""What a kernel that starts before its predecessor has ended does until it waits for that one, in its machine code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import triton

from sglang_uvm_offload.cuda.build import code_flags, find_nvcc, find_source

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
WAIT, LETS_START = "ACQBULK", "PREEXIT"
"""What ``griddepcontrol.wait`` and ``griddepcontrol.launch_dependents`` become."""
REGISTER = re.compile(r"\bU?R\d+\b")


def instructions(arch: str, kernel: str, folder: Path) -> list[str]:
    cubin = folder / "uvm_ops.cubin"
    subprocess.run([find_nvcc(), *code_flags(arch), "-cubin", "-o", cubin, find_source()], check=True)
    dump = subprocess.run([CUOBJDUMP, "-sass", "-fun", kernel, cubin], check=True, capture_output=True, text=True).stdout
    return [line.strip() for line in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", dump)]


def written(code: str) -> set[str]:
    """The registers that an instruction writes: the first operand, and as many after it as it is wide."""
    operation, _, operands = re.sub(r"^@!?U?P\d+\s+", "", code).partition(" ")
    first = REGISTER.match(operands.strip())
    if first is None or operation.startswith(("ST", "RED", "BAR", "BRA")):
        return set()
    name, number = re.fullmatch(r"(U?R)(\d+)", first[0]).groups()
    width = 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1
    return {f"{name}{int(number) + i}" for i in range(width)}


@pytest.mark.parametrize("arch", ["sm_90"])
def test_resolving_reads_its_state_before_it_waits_and_no_read_there_waits_for_another(arch, tmp_path):
    code = instructions(arch, "uvm_resolve_slots_kernel", tmp_path)
    assert [code.count(name) for name in (WAIT, LETS_START)] == [1, 1]
    before = code[: code.index(WAIT)]
    assert code.index(LETS_START) - len(before) < 5, "at once"
    loaded, reads = set[str](), 0
    for each in before:
        assert not re.search(r"\b(STG?|ATOMG?|REDG?)\b[^S]", each), f"writes: {each}"
        used = set(REGISTER.findall(each)) - written(each)
        if re.search(r"\bLDG?\b", each):
            reads += 1
            assert not loaded & set(REGISTER.findall(each.partition("[")[2])), f"waits for a read: {each}"
            loaded |= written(each)
        elif used & loaded:
            loaded |= written(each)
        else:
            loaded -= written(each)
    assert reads > 4 * 6, "each thread's experts, and values"
