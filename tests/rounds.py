"""A run that is killed and resumed again and again, beside one that is not; each attempt is a fork, so that imports count once.

    python tests/rounds.py ROUNDS FOLDER --model … --steps …

The runs are FOLDER/killed and FOLDER/whole. A round is killed with SIGKILL at a random time after a random step, so amid a step, a
call of the pool or a checkpoint. Prints from how many steps it went on, and how often a checkpoint was half written. All runs join
one Ray cluster, whose start would be half of a round.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import datasets  # noqa: F401  the slow imports
import ray  # noqa: F401
from nemo_automodel import NeMoAutoModelForCausalLM  # noqa: F401
from transformers import AutoConfig, AutoTokenizer  # noqa: F401

import refit
import train


def begin(flags: list, log: Path) -> int:
    """Fork a run; returns its process id."""
    if pid := os.fork():
        return pid
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os._exit(train.main(flags))


@contextlib.contextmanager
def cluster():
    """A Ray cluster of this machine, by its address."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    scratch = tempfile.mkdtemp(prefix="instar-", dir="/tmp")
    how = f"--head --block --node-ip-address 127.0.0.1 --port {port} --num-cpus 4 --num-gpus 0 --temp-dir {scratch}"
    command = [
        Path(sys.executable).with_name("ray"),
        "start",
        *how.split(),
        "--include-dashboard=false",
    ]
    head = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()  # with --block it ends all that it started
        head.wait(60)
        shutil.rmtree(scratch, ignore_errors=True)


def end(pid: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        sys.exit(f"a run ended with {code}")


def lines(out: Path, begun: float) -> int:
    """Steps in the metrics, once this attempt has cut off those that it repeats."""
    path = out / "metrics.jsonl"
    return (
        len(path.read_text().splitlines()) if path.exists() and path.stat().st_mtime > begun else 0
    )


def main(rounds: int, folder: Path, flags: list[str]) -> None:
    """All of it, in the cluster that --ray_address of the flags names."""
    folder.mkdir(parents=True, exist_ok=True)
    killed, halves, steps = folder / "killed", 0, set()
    end(begin([*flags, "--out", str(folder / "whole")], folder / "whole.log"))
    for i in range(rounds):
        resume = ["--resume"] if refit.checkpoints(str(killed)) else []
        before = max(map(refit.step_of, refit.checkpoints(str(killed))), default=0)
        steps.add(before)
        begun = time.time()
        pid = begin(
            [*flags, "--save_every", "1", "--out", str(killed), *resume], folder / "killed.log"
        )
        deadline = time.monotonic() + 120
        while lines(killed, begun) <= before + i % 4:
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if ended or time.monotonic() > deadline:
                sys.exit(f"round {i}: no more steps were taken after {before}")
            time.sleep(0.02)
        time.sleep(
            0.4 * random.random()
        )  # some seven steps at most, where the test has 12 for each round
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        half = killed / "unfinished"
        halves += half.exists() and half.stat().st_mtime > begun
    end(begin([*flags, "--out", str(killed), "--resume"], folder / "killed.log"))
    print(f"{rounds} rounds from {len(steps)} steps, {halves} killed amid a checkpoint")


if __name__ == "__main__":
    random.seed(0)
    with cluster() as address:
        main(int(sys.argv[1]), Path(sys.argv[2]), [*sys.argv[3:], "--ray_address", address])
