"""examples/sandbox.py: each limit, by planting what it forbids. As root in both ways, and as an ordinary user."""

import os
import socket
import subprocess
import sys
import time

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "examples"))
import sandbox

try:
    sandbox.unshare()
except RuntimeError as e:
    pytestmark = pytest.mark.skip(reason=str(e))


@pytest.fixture(params=["the first way", "a user namespace"])
def run(request, tmp_path, monkeypatch):
    """sandbox.run in a folder; the second way is what an ordinary user has, and is the first one without root."""
    if request.param == "a user namespace":
        if "--user" in sandbox.unshare():
            pytest.skip("the first way is this one")
        way = (sandbox.unshare()[0], "--user", "--map-root-user", *sandbox.unshare()[1:])
        if subprocess.run([*way, "true"], capture_output=True).returncode:
            pytest.skip("the kernel allows no user namespaces")
        monkeypatch.setattr(sandbox, "unshare", lambda: way)

    folder = tmp_path / "folder"
    folder.mkdir()

    def go(command, **limits):
        start, seconds = time.monotonic(), limits.setdefault("seconds", 30)
        code, output = sandbox.run(command, str(folder), **limits)
        assert time.monotonic() - start < seconds + 20
        return code, output

    go.folder = folder
    return go


def python(code: str) -> str:
    return f"python3 -c '{code}'"


def alive(mark: str) -> list[str]:
    """Processes of the machine whose command line holds `mark`."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = open(f"/proc/{pid}/cmdline").read()
        except OSError:
            continue
        found += [pid] * (mark in line)
    return found


def test_a_command_works_in_its_folder_and_says_how_it_ended(run):
    (run.folder / "in.txt").write_text("41")
    assert run("pwd; expr $(cat in.txt) + 1 > out.txt; echo no >&2; exit 3") == (3, "/box\nno\n")
    assert (run.folder / "out.txt").read_text() == "42\n"
    assert run("cat out.txt; echo more > out.txt; echo to > /dev/stderr; kill -9 $$") == (
        137,
        "42\nto\n",
    )
    assert run(python("print(6*7)") + " | cat <(cat) && rm out.txt && mkdir a && touch a/b") == (
        0,
        "42\n",
    )
    assert run("touch a/c && ls a && rm -r a && echo x > /tmp/x && cat /tmp/x") == (0, "b\nc\nx\n")
    assert run("cat /tmp/x")[0] == 1  # of another command
    more = run.folder.parent / "more"
    more.mkdir()
    (more / "x").write_text("more")
    assert (
        run(f"cat {more}/x; echo x > {more}/y", read=(str(more),))[1].startswith("more")
        and len(os.listdir(more)) == 1
    )


def test_an_endless_loop_ends_at_the_wall_time_and_before_it_at_the_cpu_time(run):
    assert run("echo began; while true; do sleep 0.1; done", seconds=1) == (
        124,
        "began\n\n[killed after 1 seconds]\n",
    )
    assert run("trap '' TERM INT ALRM HUP; kill -ALRM 1; exec sleep 60", seconds=1)[0] == 124
    assert run(python("while True: pass"), cpu=1, seconds=60)[0] in (
        152,
        137,
    )  # SIGXCPU, or SIGKILL after it


def test_memory_files_and_processes_are_limited(run):
    assert "MemoryError" in run(python('x = b"x" * (1 << 30)'), memory=512 << 20)[1]
    assert run(python('x = b"x" * (1 << 26)'), memory=512 << 20)[0] == 0
    code, output = run(python('open("big", "wb").write(b"x" * (8 << 20))'), file=1 << 20)
    assert (
        code == 1 and "File too large" in output and (run.folder / "big").stat().st_size <= 1 << 20
    )
    assert "No space left" in run("head -c 9M /dev/zero > /tmp/big", tmp=1 << 20)[1]
    if os.getuid() or "--user" not in sandbox.unshare():
        fork = "import os, time\nfor _ in range(99):\n if not os.fork(): time.sleep(60)"
        code, output = run(python(fork), processes=20)
        assert code == 1 and "BlockingIOError" in output


def test_nothing_that_a_command_started_outlives_it(run):
    mark = f"31.{os.getpid()}"
    assert run(
        f"(setsid nohup sleep {mark} &) ; sleep {mark} & disown; echo left; exec 1>&- 2>&-; exit 0"
    ) == (
        0,
        "left\n",
    )
    assert run(f"exec setsid sleep {mark}", seconds=1)[0] == 124
    end = time.monotonic() + 5
    while (left := alive(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    assert left == []


def test_endless_output_is_cut_and_costs_no_memory(run):
    code, output = run("yes", output=10_000)
    assert (
        code == 137
        and output.endswith("[killed: more output than 10000 bytes]\n")
        and len(output) < 10_100
    )
    code, output = run("head -c 10000 /dev/zero | tr '\\0' x", output=10_000)
    assert (code, output) == (0, "x" * 10_000)
    assert run("printf '\\377\\0a'") == (0, "\ufffd\0a")


def test_files_outside_of_the_folder_are_neither_written_nor_read(run):
    secret = run.folder.parent / "secret"  # beside it
    secret.write_text("the answer")
    (run.folder / "link").symlink_to(secret)
    mark = f"planted-{os.getpid()}"
    outside = [f"{path}/{mark}" for path in ("/usr", "/etc", "", "/dev", sys.base_prefix)]
    hidden = (
        secret,
        __file__,
        "/root/.ssh",
        "/home",
        "/sys/kernel",
        "/proc/1/root/etc",
        "/box/../../../home",
    )
    forbidden = [f"ls {path}" for path in hidden] + [
        f"echo x > {path}" for path in (*outside, secret, "link")
    ]
    forbidden += [
        "mount -o remount,rw /usr",
        "umount /box",
        "mount -t tmpfs x /box",
        "chroot / true",
        "cat link",
    ]
    forbidden += [
        f"unshare --user --map-root-user --mount sh -c 'mount -o remount,rw,bind /usr && touch {outside[0]}'"
    ]
    try:
        assert run(
            "; ".join(f"({command}) 2>/dev/null && echo {i}" for i, command in enumerate(forbidden))
        ) == (1, "")
        assert secret.read_text() == "the answer" and not any(map(os.path.exists, outside))
    finally:  # a sandbox that leaks leaves nothing on the machine either
        for path in filter(os.path.exists, outside):
            os.remove(path)
    assert run("grep -E 'Cap(Prm|Eff|Bnd).*[1-9a-f]' /proc/self/status") == (
        1,
        "",
    )  # no capability is left


def test_there_is_no_network(run):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        reach = f'import socket; socket.create_connection(("127.0.0.1", {port}), 3)'
        subprocess.run([sys.executable, "-c", reach], check=True, timeout=10)
        listener.accept()[0].close()  # the listener can be reached from outside
        code, output = run(python(reach))
        assert code == 1 and "Network is unreachable" in output
        with pytest.raises(TimeoutError):
            listener.accept()


def test_the_environment_and_other_processes_are_not_seen(run, monkeypatch):
    monkeypatch.setenv("PLANTED_API_KEY", "secret-of-the-trainer")
    assert (
        "secret-of-the-trainer"
        not in run("env; cat /proc/*/environ; ls -l /proc/1/fd /proc/1/cwd")[1]
    )
    assert run("echo $HOME $PLANTED_API_KEY") == (0, "/tmp\n")
    code, output = run(
        python(
            'import os; print(sorted(p for p in os.listdir("/proc") if p.isdigit()), os.listdir("/proc/self/fd"))'
        )
    )
    assert code == 0 and output.startswith("['1', '2'] ['0', '1', '2', "), output


def test_a_sandbox_that_cannot_be_made_runs_nothing(run, tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="(?s)could not be made.*No such file"):
        sandbox.run("echo ran", str(tmp_path / "none"))
    monkeypatch.setattr(
        sandbox, "unshare", lambda: ("env",)
    )  # makes no namespaces: the mounts would be the machine's
    with pytest.raises(RuntimeError, match="(?s)could not be made.*no namespaces"):
        sandbox.run("echo ran > ran", str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_the_refusal_names_the_reason(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RuntimeError, match="(?s)no sandbox here.*unshare"):
        sandbox.unshare.__wrapped__()


@pytest.mark.skipif(os.getuid() != 0, reason="the tests above ran as an ordinary user")
def test_an_ordinary_user_has_it_too(tmp_path):
    code = open(sandbox.__file__).read()
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "sandbox.py").write_text(code)
    for path in (folder, *tmp_path.parents[:2], tmp_path, folder / "sandbox.py"):
        os.chmod(path, 0o755)
    os.chown(folder, 65534, 65534)
    python3 = "/usr/bin/python3"
    if not os.path.exists(python3):
        pytest.skip("no Python that an ordinary user may run")
    command = "pwd; touch made; touch /usr/x; cat /etc/shadow | head -c 9"
    done = subprocess.run(
        [python3, folder / "sandbox.py", command, folder],
        user=65534, group=65534, extra_groups=[], capture_output=True, text=True, timeout=30, env={}, cwd="/"
    )  # fmt: skip
    if "the kernel allows neither" in done.stderr:
        pytest.skip("the kernel allows no user namespaces")
    assert done.stdout.startswith("/box\n") and "Read-only file system" in done.stdout, done.stderr
    assert "Permission denied" in done.stdout and (folder / "made").stat().st_uid == 65534
