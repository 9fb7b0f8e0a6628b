"""Free memory, as the stand-in driver says it."""

from __future__ import annotations

from standin.run import Standin


def test_free_vram_is_what_the_driver_says(standin: Standin):
    program = """
        from sglang_uvm_offload.cuda.device import free_vram
        print(json.dumps(free_vram([0])))
    """
    assert standin.run(program, vram=3 << 30).said == [3 << 30]


def test_a_driver_that_cannot_say_ends_in_its_reason(standin: Standin):
    program = """
        from sglang_uvm_offload.cuda.device import DriverError, free_vram
        try:
            free_vram([0])
        except DriverError as refusal:
            print(json.dumps(str(refusal)))
    """
    assert "no CUDA-capable device" in standin.run(program, cuinit=100).said


def test_the_gpus_of_this_machine_are_those_that_the_driver_shows(standin: Standin):
    program = """
        from sglang_uvm_offload.cuda.device import visible_gpus
        print(json.dumps(visible_gpus()))
    """
    ((name, nbytes),) = standin.run(program, vram=3 << 30).said
    assert (name, nbytes) == ("NVIDIA H200", 3 << 30)
    assert standin.run(program, vram=1 << 30, name="NVIDIA H100 80GB HBM3").said == [["NVIDIA H100 80GB HBM3", 1 << 30]]
    assert standin.run(program, cuinit=100).said == []
