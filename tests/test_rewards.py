"""The reward functions of examples/: what they take for right and for wrong, and that no output makes the one of numbers raise."""

import random
import time

import pytest

from agent import Task, load, load_agent

grade = load("examples/math_reward.py", "reward", "--reward")


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
