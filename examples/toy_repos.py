"""Small programming tasks for agents with a shell, as many as you like from a seed, and the reward that grades them.

    $ python examples/toy_repos.py fix 200 > fix.jsonl      # a repository with a bug and a failing test: swe_agent.py
    $ python examples/toy_repos.py write 200 > write.jsonl  # "write solution.py with a function …": claude_code.sh

A row's label holds hidden calls of one function and what they return. `reward` makes the calls in a sandbox, compares
outside of it: the code that is graded never meets the answers, and gains nothing by ending early or by printing "ok".
A task is one function below with bugs planted. Add your own: a function with a docstring, its bugs as (right, wrong)
pieces of text, and a way to draw its arguments.
"""

import inspect
import json
import random
import shlex
import sys

import sandbox


def median(numbers):
    """Return the middle of a list of numbers when sorted, of an even count the mean of the middle two, else None."""
    if not numbers:
        return None
    ordered, middle = sorted(numbers), len(numbers) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def run_lengths(text):
    """Return the runs of equal characters of a text as a list of [character, length], in order."""
    runs = []
    for character in text:
        if not runs or runs[-1][0] != character:
            runs.append([character, 0])
        runs[-1][1] += 1
    return runs


def merge_intervals(intervals):
    """Return the union of closed intervals [start, end] as a sorted list of intervals that do not touch."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged += [[start, end]]
    return merged


def is_balanced(text):
    """Return True if every bracket of a text, ( ) [ ] { }, is closed by its own kind in the right order, else False."""
    pairs, opened = {")": "(", "]": "[", "}": "{"}, []
    for character in text:
        if character in pairs.values():
            opened.append(character)
        elif character in pairs and (not opened or opened.pop() != pairs[character]):
            return False
    return not opened


def to_roman(number):
    """Return a whole number from 1 to 3999 as a Roman numeral."""
    values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
    text = ""
    for value, sign in zip(
        values, ["M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"]
    ):
        while number >= value:
            text += sign
            number -= value
    return text


TASKS = {  # function: (its bugs, how to draw its arguments)
    median: (
        [("sorted(numbers)", "list(numbers)"), ("[middle - 1]", "[middle]"), ("]) / 2", "]) // 2"), ("== 1", "== 0")],
        lambda rng: [[rng.randrange(-50, 50) for _ in range(rng.randrange(1, 9))]],
    ),
    run_lengths: (
        [("runs[-1][0]", "runs[0][0]"), ("[character, 0]", "[character, 1]"), ("runs[-1][1]", "runs[0][1]")],
        lambda rng: ["".join(rng.choices("ab ", k=rng.randrange(12)))],
    ),
    merge_intervals: (
        [("sorted(intervals)", "intervals"), ("start <=", "start <"), ("max(merged[-1][1], end)", "end")],
        lambda rng: [[[a, a + rng.randrange(6)] for a in rng.choices(range(20), k=rng.randrange(1, 7))]],
    ),
    is_balanced: (
        [("not opened\n", "True\n"), ("d.pop()", "d[0]"), ('"]": "["', '"]": "("'), ("(not opened or", "(opened and")],
        lambda rng: [rng.choice(["([{}])", "(a[b])", "x()"]) + "".join(rng.choices("()[]{}", k=rng.randrange(4)))],
    ),
    to_roman: (
        [("number >=", "number >"), (" 9, 5, 4,", " 9, 4, 5,"), ("text += s", "text = s"), ('"XC", "L"', '"XC", "V"')],
        lambda rng: [rng.randrange(1, 4000)],
    ),
}  # fmt: skip


def outcome(function, call):
    try:
        return function(*call)
    except Exception as e:
        return repr(e)


def make(rng: random.Random, kind: str) -> dict:
    """One data row of the kind "fix" or "write"."""
    function = rng.choice(list(TASKS))
    bugs, draw = TASKS[function]
    name, source = function.__name__, inspect.getsource(function)
    calls = [draw(rng) for _ in range(24)]
    answers = [function(*call) for call in calls]
    row = {"label": {"function": name, "calls": calls[4:], "answers": answers[4:]}}
    shown = [
        f"{name}({json.dumps(call)[1:-1]}) == {answer!r}"
        for call, answer in zip(calls[:4], answers)
    ]
    if kind == "write":
        head, doc = f"{name}{inspect.signature(function)}", inspect.getdoc(function)
        text = f"Write a file solution.py in the current folder with a Python function {head}.\n{doc}\nFor example:\n"
        return row | {"prompt": text + "\n".join(shown)}
    wrong, names = source, {}
    for right, bug in rng.sample(bugs, rng.choice((1, 1, 2))):
        wrong = wrong.replace(right, bug)
    exec(wrong, names)
    same = [outcome(names[name], call) == answer for call, answer in zip(calls, answers)]
    if all(same[:4]) or all(same[4:]):  # the bug has to show in both tests
        return make(rng, kind)
    test = f"from solution import {name}\n\n" + "".join(
        f"assert {line}, {line.split(' == ')[0]}\n" for line in shown
    )
    text = f"`python3 test_solution.py` fails: solution.py has a bug. Fix it; {name} will be tested with other arguments."
    return row | {
        "prompt": text,
        "files": {"solution.py": wrong, "test_solution.py": test + 'print("ok")\n'},
    }


def reward(prompt: str, label: dict, output: str, folder: str) -> float:
    """1.0 where the function in the folder's solution.py answers every hidden call rightly, else 0.0."""
    program = f"import json, sys\nfrom solution import {label['function']} as f\n"
    program += (
        "said = json.dumps([f(*call) for call in json.loads(sys.argv[1])])\nprint()\nprint(said)"
    )
    command = shlex.join(["python3", "-c", program, json.dumps(label["calls"])])
    _, said = sandbox.run(command, folder, seconds=20)
    try:
        return float(json.loads(said.rstrip().rpartition("\n")[2]) == label["answers"])
    except (ValueError, RecursionError):
        return 0.0


if __name__ == "__main__":
    for i in range(int(sys.argv[2])):
        print(json.dumps(make(random.Random(i), sys.argv[1])))
