"""The word that ranks leave for each other: the first stays; a store that is busy or lost holds up nobody."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from paceline.comm.word_in_store import WordInStore

HOST = """
import os, signal
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_the_first_word_stays():
    store = dist.HashStore()
    one, other = WordInStore(store, "why"), WordInStore(store, "why")
    assert one.read() is None
    other.leave("first")
    one.leave("second")
    assert one.read() == other.read() == "first"
    assert WordInStore(store, "else").read() is None


def test_a_store_that_this_process_waits_for_answers_all_the_same():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    word = WordInStore(dist.PrefixStore("group", store), "why")
    waiting = threading.Thread(target=lambda: store.get("late"))
    waiting.start()
    time.sleep(0.2)  # it waits by then
    word.leave("first")
    found = word.read()
    WordInStore(store, "late").leave("now")
    waiting.join(10)
    assert found == "first" and not waiting.is_alive()


def test_nobody_waits_long_for_a_store_that_was_stopped():
    with subprocess.Popen([sys.executable, "-c", HOST], stdin=-1, stdout=-1, text=True) as host:
        try:
            port = int(host.stdout.readline())
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
            word = WordInStore(store, "why")
            word.leave("first")
            assert word.read() == "first"
            host.stdin.write("\n")
            host.stdin.flush()
            time.sleep(0.5)  # it has stopped by then
            began = time.monotonic()
            assert [word.read() for _ in range(100)] == [None] * 100
            word.leave("second")
            assert time.monotonic() - began < 10  # of a minute that the calls would take
        finally:
            host.kill()
