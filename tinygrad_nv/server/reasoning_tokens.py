"""The reasoning of an answer in tokens, for what constrains the answer after it, or bounds it.

Protocol: `reasoning_tokens` finds the markers of a reasoning parser in the vocabulary. It returns None where
an answer has no reasoning, or none that its tokens tell: the model has no parser, the prompt has ended the
reasoning, or a marker is no token of its own. A constraint then holds from the first token on.
"""
from __future__ import annotations

from tinygrad_nv.engine.structured_output.params import ReasoningTokens
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.server.errors import invalid
from tinygrad_nv.server.leniency import ignore
from tinygrad_nv.server.parsers.harmony import Harmony
from tinygrad_nv.server.parsers.table import NONE, REASONING, Answer
from tinygrad_nv.server.parsers.think import Think

BUDGET = "thinking_token_budget"


def reasoning_tokens(name: str, answer: Answer, tokenizer: Tokenizer, budget: int | None
                     ) -> ReasoningTokens | None:
    """See above; `name` is the parser's."""
    if name == NONE: return None
    kind = REASONING[name]
    end = [token for each in kind.end if (token := tokenizer.backend.token_to_id(each)) is not None]
    start = tokenizer.backend.token_to_id(kind.start) if kind.start else None
    parser = kind.make(answer)
    inside = isinstance(parser, Harmony) or (isinstance(parser, Think) and parser.inside)
    ended = answer.continued or answer.prefix.rstrip().endswith("".join(kind.end))
    if len(end) < len(kind.end) or (not inside and (start is None or ended)): return None
    may_end = isinstance(parser, Harmony) and bool(answer.schemas)      # with a call, in a channel of its own
    return ReasoningTokens(None if inside else start, tuple(end), inside, may_end, budget)


def check_budget(name: str, tokenizer: Tokenizer, budget: int) -> None:
    """Ignores a budget where there is no reasoning. Raises `APIError` 400 where no token can end it."""
    if name == NONE:
        return ignore(invalid(f"{BUDGET} is {budget}, and the model has no reasoning parser; to fix: leave "
                              "it out, or start the server with --reasoning-parser", BUDGET, "unsupported"))
    if bad := [each for each in REASONING[name].end if tokenizer.backend.token_to_id(each) is None]:
        raise invalid(f"{BUDGET} is {budget}, and {bad[0]!r}, which ends the reasoning, is no token of the "
                      "vocabulary; to fix: leave it out, or bound the answer with max_completion_tokens",
                      BUDGET, "unsupported")
