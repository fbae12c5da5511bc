"""The reward functions of examples/: what they take for right and for wrong, and that no output makes them raise."""

import inspect
import json
import random
import subprocess
import sys
import time

import pytest

from agent import Task, load, load_agent

grade = load("examples/math_reward.py", "reward", "--reward")
solved = load("examples/toy_repos.py", "reward", "--reward")
import sandbox
import toy_repos


@pytest.fixture
def namespaces():
    try:
        sandbox.unshare()
    except RuntimeError as e:
        pytest.skip(str(e))


@pytest.mark.parametrize(
    "label,output",
    [
        ("15", r"First \boxed{3}, no: \boxed{15}"),
        (15, "#### 15"),
        ("15", "#### 15\nThat is all, in 2 lines."),
        ("15", "So it is 3*5 = 15."),
        ("15", "It costs $15.00."),
        ("1000", r"\boxed{1{,}000}"),
        ("1,000,000", "1000000.0"),
        ("-3", "The answer: -3"),
        ("-3", "The answer: −3"),
        ("-3", r"\boxed{- 3}"),
        ("0.5", r"\boxed{\frac{1}{2}}"),
        ("1/2", r"\boxed{\dfrac12}"),
        (r"-\frac{3}{4}", "#### -0.75"),
        ("5/2", r"\boxed{2\frac{1}{2}}"),
        ("-3/2", r"\boxed{-1 1/2}"),
        (1e-07, "0.0000001"),
        ("2000", "2e3"),
        ("50", "50%"),
        (0.5, r"\boxed{50\%}"),
        ("12", r"\boxed{12\text{ apples}}"),
        ("12", "#### 12 apples"),
        ("60", r"\boxed{60 \mathrm{km/h}}"),
        ("5", r"\boxed{5 m^2}"),
        ("90", r"\boxed{90^\circ}"),
        ("5", r"\boxed{x = 5}"),
        ("18", r"\boxed{\$18}"),
        (r"\frac{\sqrt{3}}{2}", r"thus $\boxed{\dfrac{\sqrt{3}}{2}}$."),
        (r"x^{2}+1", r"\boxed{ x^{2} + 1 }"),
        (r"\{1,2\}", r"\boxed{\{1, 2\}}"),
        ("(1, -2)", r"\boxed{\left(1,-2.0\right)}"),
        (r"\text{Tuesday}", r"\boxed{\text{tuesday}}"),
        ("She has 3+4=<<3+4=7>>7 left.\n#### 7", r"\boxed{7}"),
        (r"Hence $\boxed{\frac{2}{4}}$.", "0.5"),
        ("7", r"\boxed{7} and then \boxed{unclosed"),
        ("7", "x" * 1_000_000 + r"\boxed{7}"),
    ],
)
def test_an_equal_answer_earns_one(label, output):
    assert grade("q", label, output, "") == 1.0


@pytest.mark.parametrize(
    "label,output",
    [
        ("15", "I do not know."),
        ("15", ""),
        ("15", r"15 apples, so \boxed{}"),
        ("15", r"\boxed{15} or rather \boxed{16}"),
        ("15", "15\n####"),
        ("15", "It is 15 or 16"),
        ("1", r"\boxed{1{,}000}"),
        ("3", r"\boxed{-3}"),
        ("3", "5-3 is what we want: 2"),
        ("5", r"\boxed{5x}"),
        ("21/2", r"\boxed{2\frac{1}{2}}"),
        ("11/2", r"\boxed{1 1/2}"),
        ("12", r"\boxed{1 2}"),
        ("12", r"\boxed{1,2}"),
        ("50%", r"\boxed{5000\%}"),
        ("[0, 1]", r"\boxed{[0, 1)}"),
        ("(1, 2)", r"\boxed{(2, 1)}"),
        ("nan", r"\boxed{0}"),
        ("", "anything 3"),
        (None, "3"),
        (r"x+1", r"\boxed{x-1}"),
        ("7", r"\boxed{7}" + "x" * 1_000_000),
    ],
)
def test_another_answer_and_none_earn_nothing(label, output):
    assert grade("q", label, output, "") == 0.0


def test_no_output_makes_the_mathematics_raise_or_wait():
    rng, start = random.Random(0), time.monotonic()
    pieces = [
        r"\boxed{",
        "{",
        "}",
        "\\",
        "####",
        "1",
        ",",
        ".",
        "/",
        "0",
        "-",
        "e9",
        "%",
        " ",
        "\n",
        r"\frac",
        "٣",
        "²",
        "\ud800",
    ]
    for _ in range(3000):
        output = "".join(rng.choices(pieces, k=rng.randrange(30)))
        assert grade("q", rng.choice(["1", r"\frac{", "1/0", "x"]), output, "") in (0.0, 1.0)
    for piece in [*pieces, "1,", "1 ", r"\boxed{9", r"\frac{ ", r"\boxed{\{", "9/", "-."]:
        for output in (piece * 100_000, r"\boxed{" + piece * 9_000 + "}"):
            assert grade("q", "1", output, "") in (0.0, 1.0)
    assert time.monotonic() - start < 20


def test_a_reward_alone_is_an_agent_of_one_turn():
    env = load_agent("", reward="examples/math_reward.py")()
    env.reset(Task([{"role": "user", "content": "6*7?"}], "42"))
    assert env.step(r"\boxed{42}") == (None, 1.0, True, {}) and env.step("43")[1] == 0.0


def test_toy_repositories_are_many_and_each_shows_its_bug(namespaces, tmp_path):
    rows = {
        kind: [toy_repos.make(random.Random(i), kind) for i in range(200)]
        for kind in ("fix", "write")
    }
    assert rows == {
        kind: [toy_repos.make(random.Random(i), kind) for i in range(200)] for kind in rows
    }
    assert all(
        len({row["prompt"] + json.dumps(row.get("files")) for row in rows[kind]}) == 200
        for kind in rows
    )
    bugs = {row["files"]["solution.py"] for row in rows["fix"]}
    assert len(bugs) > 30 and not bugs & set(map(inspect.getsource, toy_repos.TASKS))
    planted = {(f, bug) for f, (pairs, _) in toy_repos.TASKS.items() for bug in pairs}
    assert all(inspect.getsource(f).count(right) for f, (right, _) in planted)
    for row in rows["fix"][:40]:
        for name, text in row["files"].items():
            (tmp_path / name).write_text(text)
        test = [sys.executable, "-B", "test_solution.py"]
        assert subprocess.run(test, cwd=tmp_path, capture_output=True, timeout=20).returncode == 1
        right = inspect.getsource(getattr(toy_repos, row["label"]["function"]))
        (tmp_path / "solution.py").write_text(right)
        assert subprocess.run(test, cwd=tmp_path, capture_output=True, timeout=20).stdout == b"ok\n"
    command = [sys.executable, "examples/toy_repos.py", "write", "3"]
    made = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    assert [json.loads(line) for line in made] == rows["write"][:3]


def test_a_repository_is_graded_by_hidden_calls_whose_answers_it_never_meets(namespaces, tmp_path):
    row = next(
        r
        for i in range(99)
        if (r := toy_repos.make(random.Random(i), "fix"))["label"]["function"] == "to_roman"
    )
    label, solution = json.loads(json.dumps(row["label"])), tmp_path / "solution.py"
    assert solved("", label, "", str(tmp_path)) == 0.0  # there is no solution
    solution.write_text(inspect.getsource(toy_repos.to_roman))
    assert solved("", label, "", str(tmp_path)) == 1.0
    solution.write_text("print('noise')\n" + inspect.getsource(toy_repos.to_roman))
    assert solved("", label, "", str(tmp_path)) == 1.0
    for cheat in (
        row["files"]["solution.py"],
        "import os\nos._exit(0)",
        "print('ok')\nraise SystemExit(0)",
        "def to_roman(n): return ANY",
        "import os\ndef to_roman(n): print('[]'); os._exit(0)",
        "class A(str):\n def __eq__(self, other): return True\ndef to_roman(n): return A('I')",
        "def to_roman(n): return float('nan')",
        "print('[' * 100000)\nimport os, sys\nsys.stdout.flush()\nos._exit(0)",
        "import sys\nsys.stdout.write('1' * (1 << 22))",
        "import os\nos.system('rm -rf ./* &')",
    ):
        solution.write_text(cheat)
        assert solved("", label, "", str(tmp_path)) == 0.0, cheat
