"""Breaks processes of a real run at named moments, and notes when; run as train.py:

    python tests/faults.py kill:engine:refit:2,stop:core:decode:3 --steps 6 …

kill (SIGKILL), stop (SIGSTOP), or of rank 0 itself: full (no file grows over 100 kB any more), hang (for ever).

who: engine, core (vLLM's process below it), worker (one of its tensor-parallel ones), runner, pool, rank0, rank1. when: idle (the
trainer learns), decode (it waits for a batch), refit (its first bucket is to be sent), recovery (the same, of a refit that is
repeated since an engine has died), checkpoint (its folder is open). The last number: at which of these moments, from 1.
<out>/faults.jsonl has the time of each kill and of each step's end.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "token")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

NAMES = {
    "engine": "ray::Engine",
    "core": "VLLM::EngineCore",
    "worker": "VLLM::Worker_TP1",
    "runner": "ray::Runner",
    "pool": "ray::Rollouts",
}


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, whichever of its threads started them."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def find(who: str, top: int) -> int:
    """The process id of `who` in the run whose first process is `top`."""
    for pid in descendants(top):
        try:
            name, variables = (
                Path(f"/proc/{pid}/cmdline").read_text(),
                Path(f"/proc/{pid}/environ").read_text(),
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
        rank = (
            f"\0LOCAL_RANK={who[-1]}\0" in variables and "faults.py" in name
        )  # what Ray starts has other names
        if name.startswith(NAMES[who]) if who in NAMES else rank:
            return pid
    raise LookupError(f"no {who} below {top}")


class Faults:
    """The plan of kills, carried out by rank 0."""

    def __init__(self, plan: str, out: Path):
        self.plan, self.out, self.seen = [x for x in plan.split(",") if x], out, Counter()

    def note(self, **what) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "faults.jsonl").open("a") as f:
            f.write(json.dumps(what | {"time": time.time()}) + "\n")

    def moment(self, when: str, delay: float = 0.0) -> None:
        """It is now, for the next time; kill whoever has to die."""
        if int(os.environ.get("RANK", "0")):
            return
        self.seen[when] += 1
        for how, who, *at in [fault.split(":") for fault in self.plan]:
            if at == [when, str(self.seen[when])]:
                threading.Timer(
                    delay, self.strike, (how, who, when)
                ).start() if delay else self.strike(how, who, when)

    def strike(self, how: str, who: str, when: str) -> None:
        pid = (
            find(who, os.getpid() if who in NAMES else os.getppid())
            if how in ("kill", "stop")
            else 0
        )
        self.note(how=how, who=who, when=when)
        if how == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        elif how == "hang":
            time.sleep(10_000)
        else:
            os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def before(place, name: str, act) -> None:
    """Have `act` called, with the same arguments, before place.name."""
    real = getattr(place, name)

    def both(*args, **kwargs):
        act(*args)
        return real(*args, **kwargs)

    setattr(place, name, both)


def main() -> int:
    import refit
    import train

    argv = sys.argv[2:]
    faults, calls, versions = Faults(sys.argv[1], Path(argv[argv.index("--out") + 1])), set(), []

    def decode(r, call) -> None:
        if call not in calls:  # it is called again for the same batch when an engine has come back
            calls.add(call)
            faults.moment("decode", 0.3)

    def sent(mover, bucket) -> None:
        if not mover.sent:  # the engines wait for the first one
            faults.moment("recovery" if versions.count(versions[-1]) > 1 else "refit")

    before(train, "update", lambda *_: faults.moment("idle"))
    before(train, "watch", decode)
    before(refit.Refit, "__call__", lambda _, version: versions.append(version))
    before(refit.Refit, "send", sent)
    before(refit, "training_state", lambda *_: faults.moment("checkpoint"))
    before(train.Log, "write", lambda log, m: faults.note(step=m["step"]))
    return train.main(argv)


if __name__ == "__main__":
    sys.exit(main())
