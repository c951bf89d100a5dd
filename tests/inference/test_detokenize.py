"""Text while it comes: characters of several tokens, stop strings, several sequences in order."""

import io

import pytest
from tokenizers import decoders

from kitty_jax.inference.detokenize import InOrder, StoppedText, TextStream


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


def test_tokenizers_that_fall_back_to_bytes() -> None:
    """Their decoder puts a mark for every byte of what is no character yet."""
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    words = [" ok", *(f"<0x{byte:02X}>" for byte in "€ 漢字😀".encode()), " word"]

    def decode(ids) -> str:
        return decoder.decode([words[i] for i in ids])

    for ids in ([1, 2, 3, 0], [*range(len(words))] * 6, [*range(5, 8)] * 40, [1, 2, 0, 3, 0], [1, 2]):
        text = TextStream(decode)
        pieces = [text.push([i]) for i in ids]
        assert "".join(pieces) + text.finish() == decode(ids)
    text = TextStream(decode)
    assert [text.push([i]) for i in (1, 2, 3, 0)] == ["", "", "€", " ok"]


def test_a_stop_string_cuts_the_text_whatever_the_pieces() -> None:
    whole = b"one\nQ :\nQ: two Q:\xe2\x82\xac"
    for size in (1, 2, 3, 50):
        text = StoppedText(decode, ["two", "\nQ:"])
        found = next(i for i in range(0, len(whole), size) if text.push(whole[i : i + size]))
        assert found <= 9 < found + size  # where the last byte of the first one comes
        assert text.finish() == "one\nQ :"
    text = StoppedText(decode, ["Q"])
    assert not text.push(b"no end \xe2\x82")
    assert text.finish() == "no end \ufffd"
    text = StoppedText(decode, ["\ufffd"])
    assert not text.push(b"cut \xe2\x82")
    assert text.finish() == "cut "


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
