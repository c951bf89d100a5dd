"""The parts of the evaluations that need no model: answers, programs, results on disk, intervals, recall cases."""

import json
import math

import pytest

from kitty_jax.inference.sampling import Greedy, Sampling
from kitty_jax.research.tasks import gsm8k, humaneval, recall
from kitty_jax.research.tasks.comparison import (
    accuracy_interval,
    compare,
    mcnemar,
    paired_difference,
    summarize,
    wilson,
)
from kitty_jax.research.tasks.programs import Limits, run_program
from kitty_jax.research.tasks.protocol import PRESETS, Protocol
from kitty_jax.research.tasks.results import open_results, read_results


@pytest.mark.parametrize(
    "text,value,source",
    [
        ("2 + 3 = 5\n#### 5", "5", "mark"),
        ("#### 1\nno, wait\n#### $1,250.00", "1250", "mark"),
        ("so " + "9" * 300 + ".50 in all", "9" * 300 + ".5", "last number"),
        ("#### 18 eggs for 3 people", "18", "mark"),
        ("It is 12, so 7.50 dollars.", "7.5", "last number"),
        ("minus: -3", "-3", "last number"),
        ("####\nseven, or 7", "7", "last number"),
        ("<think>#### 4</think>So 9.", "9", "last number"),
        ("I do not know.", None, "none"),
        ("The answer is \\boxed{1,000}.", "1000", "last number"),
    ],
)
def test_answers(text, value, source):
    assert gsm8k.extract_answer(text) == gsm8k.Answer(value, source)


def test_the_examples_give_their_answers_and_ask_the_question():
    answers = [gsm8k.extract_answer(a).value for _, a in gsm8k.EXAMPLES]
    assert answers == ["19", "30", "42", "15", "75", "55", "375", "240"]
    prompt = gsm8k.few_shot_prompt("How many?")
    assert prompt.count("Question: ") == 9
    assert prompt.endswith("Question: How many?\nAnswer:")


def test_problems_of_a_file(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(
        "".join(json.dumps({"question": f"q{i}", "answer": f"so\n#### {i},000"}) + "\n" for i in range(1, 5))
    )
    assert gsm8k.load_problems(file, 1, 2) == [gsm8k.Problem(1, "q2", "2000"), gsm8k.Problem(2, "q3", "3000")]
    for offset, items, message in (
        (3, 2, "has 4 problems; wanted 2"),
        (-1, 1, "offset 0 or more"),
        (0, 0, "1 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            gsm8k.load_problems(file, offset, items)
    file.write_text('{"question": "q"}\n')
    with pytest.raises(ValueError, match=r"line 1: wanted text fields question, answer; missing \['answer'\]"):
        gsm8k.load_problems(file)
    with pytest.raises(ValueError, match="no file"):
        gsm8k.load_problems(tmp_path / "none")


TASK = humaneval.Task(
    "T/0",
    "import math\n\n\ndef area(r):\n    '''Of a circle.'''\n",
    "area",
    "def check(f):\n    assert abs(f(1) - 3.14159) < 1e-3\n",
)
BODY = "    return math.pi * r * r\n"


@pytest.mark.parametrize(
    "text,chat",
    [
        (BODY, False),
        (f"Sure:\n```python\ndef area(r):\n{BODY}```\nand a test\n```python\nprint(area(2))\n```", True),
        (f"```\ndef area(r):\n{BODY}", True),  # cut off before the end of the block
        (f"```python\n{BODY}```", True),
        (f"<think>```python\ndef area(r):\n    return 0\n```</think>```python\ndef area(r):\n{BODY}```", True),
        (f"def area(r):\n{BODY}", True),
    ],
)
def test_programs_of_completions(text, chat):
    program = humaneval.program_of(TASK, text, chat)
    scope = {}
    exec(humaneval.test_program(TASK, program), scope)
    assert scope["area"](2) == pytest.approx(4 * math.pi)


@pytest.mark.parametrize(
    "source,passed,detail",
    [
        ("x = 1", True, ""),
        ("assert 1 == 2, 'no'", False, "AssertionError: no"),
        ("import sys; sys.exit(0)", False, "exited before its end"),
        ("while True: pass", False, "timed out"),
        ("import time; time.sleep(60)", False, "timed out"),
        ("x = bytearray(1 << 30)", False, "MemoryError"),
        (
            "f = open('x', 'wb'); [f.write(bytes(1 << 20)) for _ in range(64)]",
            False,
            "OSError: [Errno 27] File too large",
        ),
        ("import os; assert 'SECRET' not in os.environ and os.listdir('.') == []", True, ""),
    ],
)
def test_programs_run_within_limits(source, passed, detail, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    outcome = run_program(source, Limits(seconds=1 if detail == "timed out" else 20, memory_mb=512))
    assert (outcome.passed, outcome.detail) == (passed, detail)


def test_results_are_taken_up_again(tmp_path):
    file = tmp_path / "new" / "r.jsonl"
    with open_results(file, {"a": (1, 2)}, {"device": "x"}) as results:
        results.append("0", {"text": "é"})
        with pytest.raises(ValueError, match="row '0' already"):
            results.append("0", {})
        with pytest.raises(ValueError, match="in use by another run"), open_results(file, {"a": [1, 2]}):
            pass
    with file.open("a") as stream:
        stream.write('{"key": "1", "te')  # an interruption
    with open_results(file, {"a": [1, 2]}, {"device": "y"}) as results:
        assert results.rows == {"0": {"key": "0", "text": "é"}}
        results.append("1", {"text": "b"})
    settings, rows = read_results(file)
    assert settings == {"a": [1, 2]}
    assert [row["key"] for row in rows] == ["0", "1"]
    with (
        pytest.raises(ValueError, match=r"other settings: a \[1, 2\] there, 3 now; b null there, 4 now"),
        open_results(file, {"a": 3, "b": 4}),
    ):
        pass
    file.write_text(file.read_text() + "rubbish\n")
    with pytest.raises(ValueError, match="line 4 is no JSON"), open_results(file, {"a": [1, 2]}):
        pass


HEAD = '{"settings": {"a": 1}, "about": {}}\n'


@pytest.mark.parametrize(
    "text,message",
    [
        ('{"settings": 3}\n', 'line 1: wanted an object with "settings", an object, got {"settings": 3}'),
        ("null\n", 'line 1: wanted an object with "settings", an object, got null'),
        (HEAD + '{"key": [1]}\n', 'line 2: wanted an object with "key", a text, got {"key": [1]}'),
        (HEAD + "null\n", 'line 2: wanted an object with "key", a text, got null'),
        (HEAD + '{"key": "x"}\n{"key": "x", "b": 1}\n', "line 3 is a second row 'x'"),
        (HEAD + "\udcff\n", "line 2 is no JSON"),
    ],
)
def test_what_is_no_file_of_results_is_refused(tmp_path, text, message):
    file = tmp_path / "r.jsonl"
    file.write_bytes(text.encode(errors="surrogateescape"))
    for attempt in (lambda: read_results(file), lambda: open_results(file, {"a": 1}).__enter__()):
        with pytest.raises(ValueError) as error:
            attempt()
        assert str(file) in str(error.value)
        assert message in str(error.value)


@pytest.mark.parametrize("text", ["dear diary", "dear diary,\ntoday", '{"settings": 3}', HEAD.replace("1", "2") + "{"])
def test_a_file_that_is_refused_stays_as_it_is(tmp_path, text):
    file = tmp_path / "r.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=str(file)), open_results(file, {"a": 1}):
        pass
    assert file.read_text() == text


@pytest.mark.parametrize("size", [0, 1, 14, 20, len(HEAD) - 1])
def test_a_head_that_was_cut_short_is_written_anew(tmp_path, size):
    file = tmp_path / "r.jsonl"
    file.write_text(HEAD[:size])
    with open_results(file, {"a": 1}) as results:
        results.append("x", {})
    assert file.read_text() == HEAD + '{"key": "x"}\n'


def test_intervals():
    # Wilson: 81 of 263 and 0 of 20 (Newcombe 1998, Table I). Paired: for many items, the plain normal interval.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0, 0.1611), abs=1e-4)
    low, high = paired_difference(3600, 1200, 200, 5000)
    half = 1.96 * math.sqrt(1400 - 1000**2 / 10000) / 10000
    assert (low, high) == pytest.approx((0.1 - half, 0.1 + half), abs=2e-4)
    assert paired_difference(3600, 200, 1200, 5000) == pytest.approx((-high, -low))
    assert paired_difference(5, 0, 0, 5)[0] <= 0 <= paired_difference(5, 0, 0, 5)[1]
    assert mcnemar(0, 0) == 1
    assert mcnemar(1, 9) == pytest.approx(2 * 11 / 1024)
    assert accuracy_interval([[True], [False]]) == wilson(1, 2)
    half = 1.96 / 3  # means of 1, 1 and 0: their standard error is 1/3
    assert accuracy_interval([[1, 1], [1, 1], [0, 0]]) == pytest.approx((2 / 3 - half, 1), abs=1e-4)
    assert accuracy_interval([[1, 0]]) == (0, 1)


def test_a_run_against_full_precision():
    def rows(answers, right):
        out = []
        for i, (answer, correct) in enumerate(zip(answers, right, strict=True)):
            out.append({"key": str(i), "item": i, "answer": answer, "correct": correct, "text": answer or ""})
        return [{**row, "tokens": 10 + i, "ended": "length" if i == 0 else "eos"} for i, row in enumerate(out)]

    full = rows(["1", "2", None, "4"], [1, 1, 0, 0])
    cache = rows(["1", "3", None, "5"], [1, 0, 0, 1])
    one = summarize(full)
    assert (one["accuracy"], one["cut_off"], one["mean_tokens"], one["items"]) == (0.5, 1, 11.5, 4)
    two = compare(full, cache[::-1])
    assert [two[n] for n in ("both", "only_full", "only_cache", "neither")] == [1, 1, 1, 1]
    assert (two["difference"], two["same_answer"], two["same_text"], two["p"]) == (0, 0.25, 0.5, 1)
    with pytest.raises(ValueError, match="no item in common"):
        compare(full, [{**row, "key": "x"} for row in cache])


def test_the_presets_are_the_papers():
    for name, protocol in PRESETS.items():
        assert protocol.sampler() == Sampling(0.6, 20, 0.95)
        assert protocol.max_new_tokens == (32768 if name.startswith("aime") else 4096)
        assert protocol.repeats == (10 if name.startswith("aime") else 1)
    assert isinstance(Protocol(temperature=0).sampler(), Greedy)
    for change in ({"repeats": 0}, {"max_new_tokens": 1.5}, {"temperature": -1}, {"top_p": 2}, {"top_k": 0}):
        with pytest.raises(ValueError, match=next(iter(change))):
            Protocol(**change)


def encode(text):
    return list(text.encode())


@pytest.mark.parametrize("task", recall.TASKS)
def test_recall_cases_hold_their_fact_at_their_depth(task):
    maker = recall.Cases(
        encode, recall.sentences_of("One sentence.  And\nanother one! A third?"), start=[1], reply=[2, 3]
    )
    for depth in (0, 0.5, 1):
        case = maker.make(task, 600, depth, seed=5)
        fact = recall.fact_of(task, 5)
        text = bytes(case.context[1:]).decode()
        assert case.context[0] == 1
        assert text.count(fact.sentence) == 1
        assert text.index(fact.sentence) / (len(text) - len(fact.sentence)) == pytest.approx(depth, abs=0.06)
        assert 600 - len(" And another one!") < len(case.context) + len(case.question) <= 600
        assert bytes(i for i in case.question if i > 3).decode() == f"\n\n{fact.question}{fact.opening}"
        assert fact.answer not in bytes(case.question).decode()
    assert maker.make(task, 600, 0, 5) != maker.make(task, 600, 0, 6)
    with pytest.raises(ValueError, match="length 40 has no room"):
        maker.make(task, 40, 0, 5)
    with pytest.raises(ValueError, match="depths are from 0"):
        maker.make(task, 600, 2, 5)


def test_recall_matches_whole_words():
    assert recall.matches(" 12345. Yes", "12345")
    assert recall.matches(' **"Amber"', "amber")
    for text in ("123456", "1 2345", "it is 12345", ""):
        assert not recall.matches(text, "12345")
