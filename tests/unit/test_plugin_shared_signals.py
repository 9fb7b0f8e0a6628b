"""A process that outlives the first signal to all processes of a server: by how much, and which signals it leaves alone."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from scripts.harness.patience import patience

PROGRAM = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background may have inherited SIG_IGN
signal.signal(signal.SIGTERM, signal.SIG_DFL)
from sglang_uvm_offload.plugin.operate import shared_signals
{first}
print("ready", flush=True)
for line in sys.stdin:
    print("alive", flush=True)
"""
OUTLIVE = "shared_signals.outlive()"
SECONDS = "shared_signals.LAST_SECONDS = {}\n"


class Program:
    def __init__(self, first: str):
        code = PROGRAM.format(first=first)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def alive(self) -> bool:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline() == "alive\n"

    def ended(self) -> int:
        return self.process.wait(patience(60))


@pytest.fixture
def start():
    programs = []

    def started(first: str) -> Program:
        programs.append(Program(first))
        return programs[-1]

    yield started
    for program in programs:
        program.process.kill()
        program.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_process_as_the_first_would_have(start, number):
    program = start(OUTLIVE)
    program.process.send_signal(number)
    assert program.alive()
    program.process.send_signal(number)
    assert program.ended() == -number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_without_a_launcher_that_ends_it_the_process_ends_itself(start, number):
    program = start(SECONDS.format(0.2) + OUTLIVE)
    program.process.send_signal(number)
    assert program.ended() == -number


def test_a_handler_of_someone_elses_stays(start):
    program = start("signal.signal(signal.SIGTERM, lambda *args: sys.exit(3))\n" + OUTLIVE)
    program.process.send_signal(signal.SIGTERM)
    assert program.ended() == 3


def test_signals_that_are_ignored_stay_ignored(start):
    program = start(SECONDS.format(0.2) + "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + OUTLIVE)
    for _ in range(2):
        program.process.send_signal(signal.SIGINT)
        assert program.alive()


def test_a_thread_changes_nothing(start):
    program = start("thread = threading.Thread(target=shared_signals.outlive)\nthread.start()\nthread.join()")
    program.process.send_signal(signal.SIGTERM)
    assert program.ended() == -signal.SIGTERM
    assert program.process.stderr.read() == ""
