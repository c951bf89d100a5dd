"""Streaming: the same tokens as generate, in pieces, and text that comes character by character."""

import io
import itertools

import jax
import numpy as np
import pytest

from kitty_jax.inference.decode_loop import jit_advance, jit_start
from kitty_jax.inference.detokenize import InOrder, TextStream
from kitty_jax.inference.generate import PoolExhaustedError, generate, prepare, stream
from kitty_jax.inference.sampling import Sampling
from tests.inference.generate_cases import PROMPTS, small_cache, tiny_model

OPTIONS = {
    "cache": small_cache("kitty_pro"),
    "max_new_tokens": 40,
    "capacity": 96,
    "sampler": Sampling(temperature=1.2, top_k=40, top_p=0.95, min_p=0.001),
}


def joined(chunks) -> np.ndarray:
    return np.concatenate(list(chunks), axis=1)


@pytest.mark.parametrize("chunk", [1, 7, 40, 1000])
def test_stream_gives_the_tokens_of_generate_without_compiling_again(chunk) -> None:
    wanted = generate(tiny_model(), PROMPTS, **OPTIONS)
    sizes = (jit_start._cache_size(), jit_advance._cache_size())
    chunks = list(stream(tiny_model(), PROMPTS, chunk=chunk, **OPTIONS))
    assert np.array_equal(joined(chunks), wanted.tokens)
    assert (jit_start._cache_size(), jit_advance._cache_size()) == sizes
    assert [c.shape for c in chunks] == [(3, min(chunk, 40 - i)) for i in range(0, 40, chunk)]
    assert all(isinstance(c, np.ndarray) and c.dtype == np.int32 for c in chunks)


@pytest.mark.parametrize("chunk", [1, 5])
def test_stream_stops_when_all_have_ended(chunk) -> None:
    free = generate(tiny_model(), PROMPTS, **OPTIONS)
    eos = sorted({int(row[i]) for row, i in zip(free.tokens, (2, 4, 6), strict=True)})
    wanted = generate(tiny_model(), PROMPTS, eos=eos, **OPTIONS)
    tokens = joined(stream(tiny_model(), PROMPTS, chunk=chunk, eos=eos, **OPTIONS))
    longest = int(wanted.lengths.max())
    assert tokens.shape[1] == longest <= 7
    assert np.array_equal(tokens, wanted.tokens[:, :longest])


def test_stream_can_be_closed_and_started_again() -> None:
    generation = prepare(tiny_model(), PROMPTS, **OPTIONS)
    iterator = generation.stream()
    first = joined(itertools.islice(iterator, 3))
    iterator.close()
    assert list(iterator) == []
    assert np.array_equal(first, generation.run().tokens[:, :3])


def test_stream_checks_at_once() -> None:
    with pytest.raises(ValueError, match="empty prompt: row 1"):
        stream(tiny_model(), [[1], []], max_new_tokens=3)
    with pytest.raises(ValueError, match="chunk must be a whole number, 1 or more, got 0"):
        stream(tiny_model(), [[1]], max_new_tokens=3, chunk=0)


def test_stream_with_a_small_pool_yields_everything_and_then_raises() -> None:
    prompts = [PROMPTS[2][:20], PROMPTS[2][1:21]]
    chunks = []
    with pytest.raises(PoolExhaustedError) as caught:
        chunks.extend(stream(tiny_model(), prompts, pool_pages=3, chunk=4, **OPTIONS))
    tokens = joined(chunks)
    assert caught.value.result.lengths.tolist() == [32, 16]
    assert np.array_equal(tokens, caught.value.result.tokens[:, :32])


def test_compile_leaves_nothing_to_compile() -> None:
    # A shape that no other test has.
    generation = prepare(tiny_model(), [[1, 2]] * 2, cache="full", max_new_tokens=5, capacity=77)
    compiled = []

    def listen(event: str, duration: float, **_) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert generation.compile() > 0
        assert len(compiled) >= 2  # so that an empty list below means something
        compiled.clear()
        chunks = list(generation.stream())
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(chunks) == 5
    assert not compiled


def decode(ids) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    "data",
    [
        "plain text",
        "naïve Ünïcödé €1 😀👩‍👩‍👧 漢字 ",
        "x" * 200 + "😀" * 50,
        "a literal \ufffd inside and at the end \ufffd",
        b"broken \xe2\x82 bytes \xff\xfe in \xf0\x9f\x98",
        bytes(range(128, 256)) * 2,
        b"\xe2\x82",
        "",
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_text_comes_in_pieces_that_join_to_the_whole(data, size) -> None:
    ids = list(data.encode() if isinstance(data, str) else data)
    text = TextStream(decode)
    pieces = [text.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(pieces) + text.finish() == decode(ids)


def test_a_character_of_several_tokens_comes_when_it_is_complete() -> None:
    text = TextStream(decode)
    assert [text.push([byte]) for byte in "a😀€".encode()] == ["a", "", "", "", "😀", "", "", "€"]
    assert text.finish() == ""


def test_text_decodes_a_bounded_number_of_ids() -> None:
    longest = []

    def measured(ids) -> str:
        longest.append(len(ids))
        return decode(ids)

    text = TextStream(measured)
    for byte in b"word " * 200:
        text.push([byte])
    assert max(longest) < 50


def test_texts_of_several_sequences_come_in_order() -> None:
    out = io.StringIO()
    writer = InOrder(["[1]", "[2]", "[3]"], out)
    writer.write(1, "later")
    writer.write(0, "now")
    assert out.getvalue() == "[1]\nnow"
    writer.end(1)
    writer.write(2, "last")
    writer.end(0)
    assert out.getvalue() == "[1]\nnow\n\n[2]\nlater\n\n[3]\nlast"
    writer.end(2)
    assert out.getvalue().endswith("last\n")


def test_a_single_text_has_no_title() -> None:
    out = io.StringIO()
    writer = InOrder(None, out)
    writer.write(0, "text")
    writer.end(0)
    assert out.getvalue() == "text\n"
