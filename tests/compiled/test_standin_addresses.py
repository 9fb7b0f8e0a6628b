"""Addresses that the stand-in keeps while their memory is given up, as by SGLang's memory saver."""

from __future__ import annotations

import signal

NBYTES = 4 << 20
RESERVED = f"""
import ctypes
cuda, at, nbytes, none = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_size_t({NBYTES}), ctypes.c_ulonglong(0)
def taken():
    return start - torch.cuda.mem_get_info()[0]
def map_it():
    handle = ctypes.c_ulonglong()
    assert cuda.cuMemCreate(ctypes.byref(handle), nbytes, None, none) == 0
    assert cuda.cuMemMap(at, nbytes, ctypes.c_size_t(0), handle, none) == 0
start = torch.cuda.mem_get_info()[0]
assert cuda.cuMemAddressReserve(ctypes.byref(at), nbytes, ctypes.c_size_t(0), None, none) == 0
"""


def test_vram_is_taken_while_memory_is_there_and_comes_back_empty(standin):
    ran = standin.run(
        RESERVED
        + """
said = [taken()]
map_it()
ctypes.memset(at.value, 7, nbytes.value)
said.append(taken())
assert cuda.cuMemUnmap(at, nbytes) == 0
said.append(taken())
map_it()
said += [taken(), ctypes.string_at(at.value, 1)[0]]
assert cuda.cuMemUnmap(at, nbytes) == 0 and cuda.cuMemAddressFree(at, nbytes) == 0
print(json.dumps([*said, taken()]))
"""
    )
    assert ran.said == [0, NBYTES, 0, NBYTES, 0, 0], ran.err
    moves = [call["call"] for call in ran.named("cuMemMap", "cuMemUnmap")]
    assert moves == ["cuMemMap", "cuMemUnmap"] * 2


def test_a_use_of_memory_that_was_given_up_ends_the_process(standin):
    use = "ctypes.string_at(at.value, 1)"
    ran = standin.run(f"{RESERVED}\nmap_it()\n{use}\ncuda.cuMemUnmap(at, nbytes)\nprint('given up', flush=True)\n{use}")
    assert (ran.out, ran.code) == ("given up\n", -signal.SIGSEGV), ran.err
