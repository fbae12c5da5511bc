"""The fixture `traces` sees what a test's own processes leave, and nothing of other programs."""

import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from conftest import traced

LEAVES = """
import mmap, os, sys, tempfile
kind, name = sys.argv[1:]
if kind == "memory":
    file = open(f"/dev/shm/{name}", "w+b")
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 4096)
    file.close()
elif kind == "folder":
    os.mkdir(f"/tmp/{name}")
    held = open(f"/tmp/{name}/log", "w")
elif kind == "temporary":
    os.mkdir(os.path.join(tempfile.gettempdir(), name))
print("made", flush=True)
sys.stdin.read()
"""


def begin(kind, name):
    """A process that makes something, and ends when its input does."""
    command = [sys.executable, "-c", LEAVES, kind, name]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process = subprocess.Popen(command, text=True, **pipes)
    assert process.stdout.readline() == "made\n"
    return process


@pytest.fixture
def name():
    """Of what is left, and goes with the test."""
    name = f"left-{uuid.uuid4().hex}"
    yield name
    shutil.rmtree(f"/tmp/{name}", ignore_errors=True)
    Path(f"/dev/shm/{name}").unlink(missing_ok=True)


def seen(name, had):
    """Until the fixture's thread has looked at the process, which lives as long as this waits."""
    deadline = time.monotonic() + 60
    while not any(path.endswith(name) for path in list(had)):
        assert time.monotonic() < deadline, had
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["memory", "folder", "temporary"])
def test_planted_what_a_process_of_the_test_leaves_behind_is_named(monkeypatch, name, kind):
    with pytest.raises(AssertionError, match=name), traced(monkeypatch) as had:
        process = begin(kind, name)
        if kind != "temporary":  # that folder is the test's own
            seen(name, had)
        process.communicate()


def test_planted_a_process_that_goes_on_is_named(monkeypatch, name):
    with pytest.raises(AssertionError, match="sys.stdin.read"), traced(monkeypatch, patience=0.5):
        process = begin("nothing", name)
    process.communicate()


def test_what_is_gone_in_the_end_is_no_trace(monkeypatch, name):
    with traced(monkeypatch) as had:
        process = begin("folder", name)
        seen(name, had)
        process.communicate()
        shutil.rmtree(f"/tmp/{name}")


@pytest.mark.parametrize("kind", ["memory", "folder", "nothing"])
def test_what_another_program_does_is_no_trace_of_the_test(monkeypatch, name, kind):
    with traced(monkeypatch), monkeypatch.context() as outside:
        outside.delenv("INSTAR_TEST")
        outside.delenv("TMPDIR")
        process = begin(kind, name)
    assert process.poll() is None and (kind == "nothing" or os.path.exists(place(kind, name)))
    process.communicate()


def place(kind, name):
    return f"{'/dev/shm' if kind == 'memory' else '/tmp'}/{name}"
