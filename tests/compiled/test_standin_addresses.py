"""Addresses that the stand-in keeps while their memory is given up, as by SGLang's memory saver."""

from __future__ import annotations

import json
import signal

PROGRAM = """
import ctypes
cuda, at, nbytes, none = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_size_t(4 << 20), ctypes.c_ulonglong(0)
def taken():
    return (start - torch.cuda.mem_get_info()[0]) >> 20
def map_it():
    handle = ctypes.c_ulonglong()
    assert cuda.cuMemCreate(ctypes.byref(handle), nbytes, None, none) == 0
    assert cuda.cuMemMap(at, nbytes, ctypes.c_size_t(0), handle, none) == 0
start = torch.cuda.mem_get_info()[0]
assert cuda.cuMemAddressReserve(ctypes.byref(at), nbytes, ctypes.c_size_t(0), None, none) == 0
said = [taken()]
map_it()
ctypes.memset(at.value, 7, nbytes.value)
said.append(taken())
assert cuda.cuMemUnmap(at, nbytes) == 0
said.append(taken())
map_it()
said += [taken(), ctypes.string_at(at.value, 1)[0]]
assert cuda.cuMemUnmap(at, nbytes) == 0
print(json.dumps(said), flush=True)
ctypes.string_at(at.value, 1)
"""


def test_memory_that_comes_back_is_empty_and_a_use_while_it_is_given_up_ends_the_process(standin):
    ran = standin.run(PROGRAM)
    assert json.loads(ran.out) == [0, 4, 0, 4, 0], ran.err
    assert ran.code == -signal.SIGSEGV
