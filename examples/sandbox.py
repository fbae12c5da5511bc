"""A sandbox for commands that a policy writes: `run(command, folder) -> (exit code, output)`, for agents and rewards.

    $ python examples/sandbox.py 'ls -l; python3 -c "print(6*7)"' some/folder

The folder is /box in there, the only place that is kept; beside it are the system's /usr, /bin, /lib and /etc and this
Python, read-only, and an empty /tmp. There is no network, not even loopback, no environment, and no other process;
whatever the command starts ends with it. LIMITS are on wall time and output, and on each process.

It is Linux namespaces, made by `unshare` of util-linux (kernel 5.12 or newer): as root, and then the command runs as a
user that exists nowhere else, who is given the folder's files; or as an ordinary user, where the kernel allows user
namespaces. In many containers neither is so, and `run` says it. It keeps a policy's accidents and shortcuts away from
the machine and from the answers. It is no boundary against somebody who looks for a hole in the kernel, and it does not
count the memory of all processes together, nor the disk: for that use a virtual machine.
"""

import contextlib
import ctypes
import functools
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading

LIMITS = {
    "seconds": 30,  # of wall time
    "cpu": 30,  # seconds of each process
    "memory": 4 << 30,  # bytes of address space of each process
    "file": 64 << 20,  # bytes of each file
    "tmp": 256 << 20,  # bytes of /tmp
    "output": 1 << 20,  # bytes; a command that says more is killed
    "processes": 128,  # not where a root without CAP_SYS_ADMIN, as some containers have, uses a user namespace
}
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", sys.base_prefix]
ENV = {
    "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
}
ENV |= {
    "PYTHONDONTWRITEBYTECODE": "1"
}  # a file that is changed within a second would not be compiled anew
DEVICES = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
MS_NOSUID, MS_BIND, MS_REC, MNT_DETACH, MOUNT_SETATTR, AT_RECURSIVE, RDONLY = (
    2,
    4096,
    16384,
    2,
    442,
    0x8000,
    1,
)
TIMED_OUT = 124  # the exit code, as of `timeout`


@functools.cache
def unshare() -> tuple[str, ...]:
    """The command that starts another in namespaces of its own. Raises RuntimeError where the kernel allows none."""
    why = []
    for user in ((), ("--user", "--map-root-user")):
        way = ("unshare", *user, "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child")
        try:
            subprocess.run([*way, "true"], check=True, capture_output=True, text=True, timeout=10)
            return way
        except (OSError, subprocess.SubprocessError) as e:
            why.append(str(getattr(e, "stderr", "") or e).strip())
    raise RuntimeError(
        f"no sandbox here: the kernel allows neither root nor this user to make namespaces: {why}"
    )


def run(command: str, folder: str, read: tuple[str, ...] = (), **limits) -> tuple[int, str]:
    """Run a shell command in `folder`: its exit code (128 + the signal that ended it, 124 for too long) and output.

    read: more folders that it may read, as a virtual environment. limits: changes of LIMITS. Raises RuntimeError, and
    runs nothing, where the sandbox cannot be made.
    """
    way, limits = unshare(), LIMITS | limits
    user = 0 if "--user" in way else 2**20 + threading.get_native_id()  # no other process has it
    task = json.dumps(
        [command, os.path.abspath(folder), [*SYSTEM, *map(os.path.abspath, read)], user, limits]
    )
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    words = [*way, sys.executable, "-I", "-S", os.path.abspath(__file__), "--inside", task]
    process = subprocess.Popen(words, env=ENV, cwd="/", start_new_session=True, **pipes)
    try:
        output = process.stdout.read(limits["output"] + 2)
    finally:  # here at the output's limit, else it has ended
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    code, text = process.returncode, output[1 : limits["output"] + 1].decode(errors="replace")
    if output[:1] != b"\0":
        raise RuntimeError(f"the sandbox could not be made:\n{output.decode(errors='replace')}")
    if len(output) > limits["output"] + 1:
        return (
            128 + signal.SIGKILL,
            f"{text}\n[killed: more output than {limits['output']} bytes]\n",
        )
    return code, text + f"\n[killed after {limits['seconds']} seconds]\n" * (code == TIMED_OUT)


def inside(command: str, folder: str, read: list[str], user: int, limits: dict) -> None:
    """The first process of the namespaces: makes the file system and starts the command; with it all of them end."""
    if os.getpid() != 1:
        raise RuntimeError(
            "there are no namespaces: what follows would change the machine's own mounts"
        )
    libc, root = ctypes.CDLL(None, use_errno=True), "/tmp"

    def call(name: str, *arguments) -> None:
        if getattr(libc, name)(*[a.encode() if isinstance(a, str) else a for a in arguments]) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"{name}{arguments}")

    folders = [path for path in read if os.path.exists(path) and not os.path.islink(path)]
    links = {path: os.readlink(path) for path in read if os.path.islink(path)}  # /bin -> usr/bin
    links |= {
        "/dev/fd": "/proc/self/fd",
        "/dev/stdout": "fd/1",
        "/dev/stderr": "fd/2",
        "/dev/shm": "/tmp",
    }
    binds = {path: path for path in folders + DEVICES} | {folder: "/box"}
    opened = {path: os.open(path, os.O_PATH) for path in binds}  # the new root may cover them
    call("mount", "tmpfs", root, "tmpfs", MS_NOSUID, "size=1m,mode=755")
    os.mkdir(root + "/tmp")
    call("mount", "tmpfs", root + "/tmp", "tmpfs", MS_NOSUID, f"size={limits['tmp']},mode=1777")
    for path in ["/box", "/dev", "/proc", *folders]:
        os.makedirs(root + path, exist_ok=True)
    for path in DEVICES:
        os.close(os.open(root + path, os.O_CREAT))
    for path, target in links.items():
        os.symlink(target, root + path)
    for path, target in binds.items():
        call("mount", f"/proc/self/fd/{opened[path]}", root + target, 0, MS_BIND | MS_REC, 0)
    with contextlib.suppress(OSError):  # a container may forbid it; then there is no /proc
        call("mount", "proc", root + "/proc", "proc", MS_NOSUID, 0)
    for path, flags, change in (
        ("", AT_RECURSIVE, (RDONLY, 0)),
        ("/box", 0, (0, RDONLY)),
        ("/tmp", 0, (0, RDONLY)),
    ):
        call(
            "syscall", MOUNT_SETATTR, -100, root + path, flags, struct.pack("4Q", *change, 0, 0), 32
        )
    os.chdir(root)
    call("pivot_root", ".", ".")
    call("umount2", ".", MNT_DETACH)
    os.chdir("/box")
    for base, _, names in os.walk("/box") if user else ():
        for path in [base, *(os.path.join(base, name) for name in names)]:
            os.lchown(path, user, user)
    os.fchown(1, user, user)  # /dev/stdout can be opened anew
    os.write(1, b"\0")  # the sandbox stands: what follows is the command's
    if child := os.fork():
        signal.signal(signal.SIGALRM, lambda *_: os._exit(TIMED_OUT))
        signal.alarm(limits["seconds"])
        while (ended := os.wait())[0] != child:
            pass
        code = os.waitstatus_to_exitcode(ended[1])
        os._exit(abs(code) + 128 * (code < 0))
    for name, limit in {
        "CPU": "cpu",
        "AS": "memory",
        "FSIZE": "file",
        "NPROC": "processes",
    }.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limits[limit], limits[limit]))
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: none is left after the exec
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    shell = shutil.which("bash") or "/bin/sh"
    os.execve(shell, [shell, "-c", command], ENV)


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        inside(*json.loads(sys.argv[2]))
    print(run(*sys.argv[1:3])[1], end="")
