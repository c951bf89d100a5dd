"""How the paper's tasks are run: the sampling of its evaluation as defaults, and a preset for each task."""

from __future__ import annotations

import dataclasses

from kitty_jax.inference.prompts import check_whole
from kitty_jax.inference.sampling import Greedy, Sampler, Sampling


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How a task's answers are generated. The defaults are the paper's (arXiv 2511.18643, section 5).

    Attributes:
        temperature: 0 is greedy, and ``top_p`` and ``top_k`` are then not used.
        top_p: see :class:`kitty_jax.Sampling`; None leaves it out.
        top_k: the same.
        max_new_tokens: most new tokens of an answer.
        repeats: how often each item is answered, with other random numbers each time.
        chat: whether prompts go through the checkpoint's chat template.
    """

    temperature: float = 0.6
    top_p: float | None = 0.95
    top_k: int | None = 20
    max_new_tokens: int = 4096
    repeats: int = 1
    chat: bool = False

    def __post_init__(self):
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_whole("repeats", self.repeats, 1)
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        self.sampler()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def sampler(self) -> Sampler:
        """The sampler of ``generate``."""
        return Greedy() if self.greedy else Sampling(self.temperature, self.top_k, self.top_p)

    def settings(self) -> dict[str, float | int | None]:
        """What decides the tokens of an answer, for the head of a results file."""
        filters = {} if self.greedy else {"top_p": self.top_p, "top_k": self.top_k}
        return {"temperature": float(self.temperature), **filters, "max_new_tokens": self.max_new_tokens}


# Names of tasks of lm_eval. Ten repeats of AIME, and chat templates for AIME alone, as in the authors' scripts; those
# leave the repeats of the other tasks at 1.
_AIME = Protocol(max_new_tokens=32768, repeats=10, chat=True)
PRESETS: dict[str, Protocol] = {
    "gsm8k_cot_llama": Protocol(),
    "minerva_math_algebra": Protocol(),
    "humaneval_instruct": Protocol(),
    "gpqa_diamond_cot_n_shot": Protocol(),
    "aime24": _AIME,
    "aime25": _AIME,
}
