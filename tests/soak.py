"""Watches a run from inside: every few seconds a line of <out>/soak.jsonl with what rank 0 and the pool hold. Run as train.py:

    python tests/soak.py --steps 100000 …

references: Ray objects that a process refers to; handles: open files; mb: resident memory. `test_faults.py` kills its processes meanwhile.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "token")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import ray

import rollout


def census() -> dict[str, float]:
    references = len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"references": references, "handles": len(os.listdir("/proc/self/fd")), "mb": resident / 1e6}


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
                    found = {"rank0": census(), "pool": ray.get(r.rollouts.census.remote())}
                    f.write(json.dumps(found | {"time": time.time()}) + "\n")
                    time.sleep(5)

        threading.Thread(target=look, daemon=True).start()
        listen(r)

    train.listen = watched
    return train.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
