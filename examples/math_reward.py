"""A reward for mathematics in one turn: the final answer of a reply against the row's label. No agent is needed.

Rows are {"prompt": "What is 3/4 of 20? End with \\\\boxed{}.", "label": "15"}; a label may be a whole solution.

$ python train.py --model Qwen/Qwen3-0.6B --reward examples/math_reward.py --data rows.jsonl \\
      --max_tokens 1024 --max_context 2048

An answer is the last \\boxed{…}, else what follows the last ####, else the last number. Two answers are equal when
they are the same number (1,000 = 1000.0, 1/2 = \\frac{1}{2} = 0.5, 50% = 50 = 0.5), a list of equal parts,
or, where they are no numbers, the same LaTeX but for spacing. No algebra: x+1 is not 1+x; where that matters, put a
library such as math-verify in place of `same`.
"""

import re
from fractions import Fraction

END = 20_000  # characters: an answer stands at a reply's end
NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d)\.(?!\d))?(?<=[\d.])(?:[eE][-+]?\d{1,3})?"
LAST = re.compile(rf"(?<![\w.]){NUMBER}(?:\s*/\s*\d+(?:\.\d+)?)?(?:\s*\\?%)?")
UNIT = re.compile(
    r"\\(?:text|mathrm|mbox|textbf)\s*\{[^{}]*\}|\^\s*\{?\s*\\circ\s*\}?|\\degree|°|\\?[$%]|[€£]"
    r"|(?<=[\d.])\s+[A-Za-z]+(?:/[A-Za-z]+)?(?:\^\{?\d\}?)?[\s.]*$"
)


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{…} (or \\fbox) whose braces close."""
    for start in reversed([m.end() for m in re.finditer(r"\\f?box(?:ed)?\s*\{", text)][-20:]):
        depth = 1
        for brace in re.finditer(r"\\.|[{}]", text[start:], re.S):  # \{ and \} are characters
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if not depth:
                return text[start : start + brace.start()]
    return None


def answer(text: str) -> str | None:
    """The final answer of a reply, None where it has none."""
    text = text[-END:].replace("−", "-")
    if (found := boxed(text)) is not None:
        return found
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    found = LAST.findall(text)
    return found[-1] if found else None


def number(text: str) -> Fraction | None:
    """The number that `text` is: 1,000  3.0  -1/2  2\\frac{1}{2}  2e3  $5  50%  5 apples  x = 5."""
    if len(text) > 200:
        return None
    text = re.sub(r"\\[dtc]?frac\s*(\d)\s*(\d)(?!\d)", r" \1/\2", text)
    text = re.sub(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1/\2", text)
    text = re.sub(
        r"\\[,!;:> ]|~|[{}]|\\left|\\right|\\approx", "", UNIT.sub("", text.replace("−", "-"))
    )
    text = re.sub(r"^\s*(?:[A-Za-z]|.*answer(?: is)?)?\s*[=:]", "", text).strip().rstrip(".,;:!")
    text = re.sub(r"(?<=[-+/])\s+|\s+(?=/)", "", text)
    found = re.fullmatch(rf"(?:([-+]?\d+)\s+(?=\d+/))?({NUMBER})(?:/({NUMBER}))?", text)
    try:
        whole, top, bottom = (Fraction(n.replace(",", "")) if n else None for n in found.groups())
        part = top / bottom if bottom is not None else top
        return part if whole is None else whole + (-part if text[0] == "-" else part)  # 1 1/2
    except (AttributeError, ValueError, ZeroDivisionError):  # no number, or one only in looks
        return None


def words(text: str) -> str:
    """LaTeX without what does not change its meaning."""
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\left|\\right|\\[,!;:> ]|[\s$]", "", text)
    return re.sub(r"\\[dtc]frac", r"\\frac", text).strip(".,;:")


def same(a: str, b: str) -> bool:
    x, y = number(a), number(b)
    if x is not None and y is not None:
        if ("%" in a) != ("%" in b):  # the other may be a share, or leave the sign out
            return x == y or (x == 100 * y if "%" in a else 100 * x == y)
        return x == y
    if (x, y) != (None, None):
        return False  # 12 is no 1 2
    a, b = words(a), words(b)
    one, two = (text.strip("()[]{}\\").split(",") for text in (a, b))
    if (
        len(one) == len(two) > 1
    ):  # a point, a set, an interval: the same brackets, and equal parts in order
        return (a[0], a[-1]) == (b[0], b[-1]) and all(map(same, one, two))
    return bool(a) and a.casefold() == b.casefold()


def reward(prompt: str, label, output: str, folder: str) -> float:
    """1.0 where the output's final answer is the label, else 0.0."""
    said, wanted = answer(output), str(label)
    if "####" in wanted or "\\boxed" in wanted:
        wanted = answer(wanted) or ""
    return float(said is not None and same(said, wanted))
