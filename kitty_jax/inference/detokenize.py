"""Between text and token ids: prompts into ids, and new ids into text while they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

_INCOMPLETE = "\ufffd"  # what a decoder puts where the bytes of a character are not all there
_CONTEXT = 8  # ids decoded again with the new ones, for tokenizers whose spaces depend on the token before


def encode_prompts(tokenizer: Any, prompts: Sequence[str], *, chat: bool = False) -> list[list[int]]:
    """Token ids of each prompt, with the beginning-of-sequence token where the tokenizer adds one.

    Args:
        tokenizer: a Hugging Face tokenizer, as :func:`kitty_jax.models.tokenizer.load_tokenizer` returns.
        prompts: B texts.
        chat: make each prompt what the user says in a conversation, by the tokenizer's chat template.

    Raises:
        ValueError: ``chat`` without a chat template, or a template that refuses a prompt.
    """
    if not chat:
        return [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    if not tokenizer.chat_template:
        raise ValueError("this checkpoint has no chat template; give prompts as plain text, without chat")
    return [_encode_chat(tokenizer, prompt) for prompt in prompts]


def _encode_chat(tokenizer: Any, prompt: str) -> list[int]:
    import jinja2

    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refused the prompt {prompt!r:.60}: {error}") from error
    # The template writes the special tokens itself.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class TextStream:
    """Turns the ids of one sequence into text piece by piece; the pieces join to what decoding all ids at once gives.

    A character whose bytes are spread over several tokens comes when it is complete: some decoders put one mark for
    what is there of it, some put one for each byte. ``decode`` takes a list of ids.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._window: list[int] = []
        self._given = 0  # characters of the decoded window that have been handed out

    def push(self, ids: Iterable[int]) -> str:
        """The text that the next ids complete, maybe none."""
        self._window.extend(ids)
        text = self._decode(self._window)
        end = len(text.rstrip(_INCOMPLETE))
        piece = text[self._given : end]
        self._given = max(self._given, end)
        if end == len(text) and len(self._window) > 4 * _CONTEXT:
            for size in range(_CONTEXT, _CONTEXT + 4):  # the last ids, from the beginning of a character on
                tail = self._decode(self._window[-size:])
                if text.endswith(tail):
                    self._window, self._given = self._window[-size:], len(tail)
                    break
        return piece

    def finish(self) -> str:
        """What is left at the end: the marks of an incomplete character, if there is one."""
        piece = self._decode(self._window)[self._given :]
        self._window, self._given = [], 0
        return piece


class StoppedText:
    """The growing text of a sequence, cut before the first of its stop strings."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()):
        self._stream, self._stop = TextStream(decode), tuple(stop)
        self._reach = max(map(len, self._stop), default=1) - 1
        self._text, self._cut = "", None

    def push(self, ids: Iterable[int]) -> bool:
        """Whether the ids complete a stop string."""
        return self._add(self._stream.push(ids))

    def finish(self) -> str:
        """All of the text, up to the stop string."""
        if self._cut is None:
            self._add(self._stream.finish())
        return self._text[: self._cut]

    def _add(self, piece: str) -> bool:
        start = max(len(self._text) - self._reach, 0)
        self._text += piece
        self._cut = min((at for stop in self._stop if (at := self._text.find(stop, start)) >= 0), default=None)
        return self._cut is not None


class InOrder:
    """Writes the texts of several sequences one below the other; that of the first unfinished one as it comes.

    ``titles``: one line per sequence, or None for a single text without a title.
    """

    def __init__(self, titles: Sequence[str] | None, out: TextIO):
        self._titles, self._out = titles, out
        self._waiting = [""] * (len(titles) if titles else 1)
        self._ended = [False] * len(self._waiting)
        self._current = 0
        self._open()

    def write(self, row: int, text: str) -> None:
        """Adds ``text`` to a sequence."""
        if row == self._current:
            self._out.write(text)
            self._out.flush()
        else:
            self._waiting[row] += text

    def end(self, row: int) -> None:
        """Says that nothing more comes for a sequence."""
        self._ended[row] = True
        while self._current < len(self._ended) and self._ended[self._current]:
            self._out.write("\n" if self._current == len(self._ended) - 1 else "\n\n")
            self._current += 1
            self._open()

    def _open(self) -> None:
        if self._current < len(self._waiting):
            title = f"{self._titles[self._current]}\n" if self._titles else ""
            self._out.write(title + self._waiting[self._current])
        self._out.flush()
