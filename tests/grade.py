"""Reward of tests/talk.py: its last answer is the label."""

import re


def reward(prompt, label, output, folder):
    answers = re.findall(r"<answer>\s*(-?\d+)\s*</answer>", output)
    return float(bool(answers) and int(answers[-1]) == int(label))
