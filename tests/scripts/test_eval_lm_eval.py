"""The adapter and `evaluate.py lm-eval` in the real harness, on tasks whose data are local JSON Lines files."""

import json
import sys

import numpy as np
import pytest

from kitty_jax.cache.spec import cache_from_spec
from kitty_jax.models.checkpoint import load_model
from kitty_jax.models.tokenizer import load_tokenizer
from kitty_jax.research.tasks.results import open_results
from scripts.evaluate import main
from tests.models.checkpoint_files import logits_of
from tests.scripts.cli_checkpoint import write_checkpoint

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'kitty-jax[eval]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the harness and of its many dependencies

TASK = """
task: tiny_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
"""
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: [" yes", " no", " 123 mats"]
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
""",
    "words": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{word}}"
generation_kwargs: {until: ["e"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
""",
}
QUESTIONS = ["the cat sat on the mat", "does it rain", "123 and 12"]


class Request:
    """What the adapter reads of the harness's requests."""

    def __init__(self, *args):
        self.args = args


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def parts(checkpoint):
    return load_model(checkpoint), load_tokenizer(checkpoint)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with the three tasks; the data sets library keeps to a folder of the test."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "data.jsonl"
    rows = [{"question": q, "label": 2, "word": "x"} for q in QUESTIONS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    for name, text in TASKS.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(TASK.format(name=name, file=file) + text)
    return tmp_path / "tasks"


def adapter(parts, cache="full", **options):
    from kitty_jax.research.lm_eval_adapter import KittyLM

    return KittyLM(*parts, cache, **{"batch_size": 2, **options})


def plain_log_probs(model, ids):
    logits = logits_of(model, np.array([ids], np.int32))[0].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return log_probs[np.arange(len(ids) - 1), ids[1:]], logits[:-1].argmax(-1) == np.array(ids[1:])


def test_log_likelihoods_are_those_of_a_plain_forward_pass(parts):
    model, tokenizer = parts
    pairs = [("the cat", " sat on the mat and more"), ("12", "3 123"), ("", "the mat"), ("does it ", "rain")]
    got = adapter(parts).loglikelihood([Request(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (log_prob, greedy) in zip(pairs, got, strict=True):
        whole = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
        before = tokenizer(context.rstrip(), add_special_tokens=False)["input_ids"]
        ids = [tokenizer.bos_token_id, *whole] if not context else whole
        size = len(whole) - len(before)
        wanted, same = plain_log_probs(model, ids)
        assert log_prob == pytest.approx(wanted[-size:].sum(), abs=1e-3)
        assert greedy == same[-size:].all()


def test_a_greedy_continuation_is_called_greedy(parts):
    model, tokenizer = parts
    contexts = ["the cat", "12", "does it rain", "mats", "and", "x"]
    ids = [tokenizer(c)["input_ids"] for c in contexts]
    texts = [tokenizer.decode(int(logits_of(model, np.array([row]))[0, -1].argmax())) for row in ids]
    context, text = next(pair for pair in zip(contexts, texts, strict=True) if pair[1].isalpha() and pair[1].isascii())
    (greedy, other) = adapter(parts).loglikelihood([Request(context, t) for t in (text, text + "zq")])
    assert greedy[1]
    assert not other[1]


def test_rolling_windows_predict_every_token_once(parts):
    model, tokenizer = parts
    text = "the cat sat on 123 mats, and the cat did not. " * 3
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    (whole,) = adapter(parts).loglikelihood_rolling([Request(text)])
    assert whole == pytest.approx(plain_log_probs(model, [tokenizer.bos_token_id, *ids])[0].sum(), abs=1e-2)
    (cut,) = adapter(parts, max_length=16).loglikelihood_rolling([Request(text)])
    wanted = plain_log_probs(model, [tokenizer.bos_token_id, *ids[:16]])[0].sum()
    for first in range(16, len(ids), 16):
        last = min(first + 16, len(ids))
        wanted += plain_log_probs(model, ids[last - 17 : last])[0][-(last - first) :].sum()
    assert cut == pytest.approx(wanted, abs=1e-2)
    assert cut != pytest.approx(whole, abs=1e-2)


@pytest.mark.slow
def test_quantized_caches_score_alike_in_one_pass_and_packed_and_unlike_full_precision(parts):
    cache = cache_from_spec("kivi2:page=16,window=16")
    request = Request("the cat sat on 123 mats, and the other cat did not. " * 3, " the mat sat on the cat")
    scores = {
        scoring: adapter(parts, cache, scoring=scoring).loglikelihood([request], disable_tqdm=True)[0][0]
        for scoring in ("simulation", "packed")
    }
    full = adapter(parts).loglikelihood([request], disable_tqdm=True)[0][0]
    assert scores["simulation"] == pytest.approx(scores["packed"], abs=1e-3)
    assert abs(scores["simulation"] - full) > 1e-2


def test_generation_stops_and_keeps_the_order_of_requests(parts):
    lm = adapter(parts)
    free = {"until": [], "max_gen_toks": 12}
    contexts = ["the cat", "12 and 123 and 12 and 123", "x", "does it"]
    texts = lm.generate_until([Request(c, free) for c in contexts])
    assert texts == [lm.generate_until([Request(c, free)])[0] for c in contexts]
    row = max(range(4), key=lambda i: len(texts[i]))
    stop = texts[row][3]
    (cut,) = lm.generate_until([Request(contexts[row], {**free, "until": stop})])
    assert cut == texts[row][: texts[row].index(stop)]
    assert lm.generate_until([Request("the cat", {**free, "temperature": 0.0, "do_sample": True})])[0] == texts[0]
    warm = {**free, "do_sample": True, "temperature": 5.0}
    assert lm.generate_until([Request("the cat", warm)]) == lm.generate_until([Request("the cat", warm)])
    assert lm.generate_until([Request("the cat", warm)]) != adapter(parts, seed=1).generate_until(
        [Request("the cat", warm)]
    )


def test_generation_is_taken_up_again(parts, tmp_path, monkeypatch):
    requests = [Request(c, {"until": [], "max_gen_toks": 8}) for c in ("the cat", "12", "the cat")]
    with open_results(tmp_path / "a.jsonl", {}) as answers:
        wanted = adapter(parts, answers=answers).generate_until(requests)
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 4
    (tmp_path / "a.jsonl").write_text("".join(lines[:3]))
    with open_results(tmp_path / "a.jsonl", {}) as answers:
        assert adapter(parts, answers=answers).generate_until(requests) == wanted
    monkeypatch.setattr("kitty_jax.research.lm_eval_adapter.Engine", None)  # whoever generates now fails
    with open_results(tmp_path / "a.jsonl", {}) as answers:
        assert adapter(parts, answers=answers).generate_until(requests) == wanted


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"num_beams": 4}, "unknown generation settings ['num_beams']"),
        ({"max_gen_toks": 256}, "max_gen_toks 256 leaves no room for a prompt in max_length 256"),
    ],
)
def test_settings_that_cannot_be_are_refused(parts, settings, message):
    with pytest.raises(ValueError) as error:
        adapter(parts).generate_until([Request("the cat", settings)])
    assert message in str(error.value)


def test_the_harness_runs_local_tasks(checkpoint, parts, tasks, tmp_path, capsys):
    command = ["lm-eval", "--model", checkpoint, "--tasks", "tiny_choice", "tiny_words", "tiny_rolling"]
    command += ["--include-path", tasks, "--out", tmp_path / "out", "--batch", "2"]
    assert main([str(x) for x in command]) == 0
    assert "torch" not in sys.modules
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    lm = adapter(parts)
    right = 0
    for question in QUESTIONS:
        scores = [s for s, _ in lm.loglikelihood([Request(question, c) for c in (" yes", " no", " 123 mats")])]
        right += int(np.argmax(scores) == 2)
    assert summary["tiny_choice"]["full"]["acc,none"]["mean"] == pytest.approx(right / 3)
    assert summary["tiny_rolling"]["full"]["word_perplexity,none"]["mean"] > 1
    result = json.loads((tmp_path / "out" / "tiny_words" / "full.0.json").read_text())
    samples = result["samples"]["tiny_words"]
    free = {"until": ["e"], "max_gen_toks": 12, "do_sample": False}
    wanted = lm.generate_until([Request(q, free) for q in QUESTIONS])
    assert [sample["resps"] for sample in samples] == [[[text]] for text in wanted]
    capsys.readouterr()
    assert main([str(x) for x in command]) == 0
    assert "loading" not in capsys.readouterr().err  # all of it was there


def test_the_protocol_reaches_the_answers(checkpoint, tasks, tmp_path):
    command = ["lm-eval", "--model", checkpoint, "--tasks", "tiny_words", "--include-path", tasks]
    command += ["--out", tmp_path / "out", "--repeats", "2", "--limit", "2"]
    command += ["--max-new-tokens", "6", "--temperature", "3"]
    assert main([str(x) for x in command]) == 0
    first, second = (json.loads((tmp_path / "out" / "tiny_words" / f"full.{r}.json").read_text()) for r in (0, 1))
    wanted = {"do_sample": True, "temperature": 3.0, "top_p": 0.95, "top_k": 20, "max_gen_toks": 6}
    assert first["settings"]["generation"] == wanted
    texts = [[s["resps"] for s in run["samples"]["tiny_words"]] for run in (first, second)]
    assert len(texts[0]) == 2
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    "change,message",
    [
        pytest.param(["--tasks", "no_such_task"], "knows no task no_such_task", marks=pytest.mark.slow),
        (["--include-path", "nowhere"], "nowhere is no folder"),
        (["--cache", "kitten"], "unknown cache 'kitten'"),
        (["--temperature", "0", "--top-k", "3"], "leave out top_k"),
    ],
)
def test_errors_come_before_the_model(checkpoint, tasks, tmp_path, capsys, change, message):
    command = ["lm-eval", "--model", checkpoint, "--tasks", "tiny_words", "--include-path", tasks]
    assert main([str(x) for x in [*command, "--out", tmp_path / "out", *change]]) == 2
    assert message in capsys.readouterr().err
