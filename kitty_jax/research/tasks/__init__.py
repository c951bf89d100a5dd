"""Evaluations by task: prompts, answers, programs, results that survive an interruption, statistics.

The command lines are `scripts/evaluate.py recall | gsm8k | humaneval | lm-eval`.
"""
