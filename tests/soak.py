"""Watches a run from inside: every few seconds a line of <out>/soak.jsonl with what its processes hold. Run as train.py:

    python tests/soak.py --steps 100000 …

Of rank 0 and the pool, references: Ray objects that the process refers to; of every process, handles: open files; mb: resident
memory. `test_faults.py` kills Runners and engines meanwhile.
"""

import contextlib
import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "token")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import ray
from faults import descendants

import rollout


def held(pid) -> dict[str, float]:
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"handles": len(os.listdir(f"/proc/{pid}/fd")), "mb": resident / 1e6}


def census() -> dict[str, float]:
    ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps of freed memory comes and goes by 100 MB
    references = len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())
    return held("self") | {"references": references}


def others() -> dict[str, dict]:
    """What each process below this one holds, by its name and id."""
    found = {}
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            program, *more = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            script = [word for word in more if word.endswith(".py")]
            found[f"{os.path.basename((script or [program])[0])} {pid}"] = held(pid)
    return found


class Rollouts(rollout.Rollouts):
    async def census(self) -> dict[str, float]:
        return census() | {"rows": len(self.store), "groups": len(self.groups) + len(self.handed)}


def main() -> int:
    import train

    rollout.Rollouts = Rollouts
    listen = train.listen

    def watched(r) -> None:
        def look() -> None:
            with open(Path(r.cfg.out, "soak.jsonl"), "w", buffering=1) as f:
                while not r.stopped:
                    found = others() | {
                        "rank0": census(),
                        "pool": ray.get(r.rollouts.census.remote()),
                    }
                    f.write(json.dumps(found | {"time": time.time()}) + "\n")
                    time.sleep(5)

        threading.Thread(target=look, daemon=True).start()
        listen(r)

    train.listen = watched
    return train.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
