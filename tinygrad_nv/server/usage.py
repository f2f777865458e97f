"""The tokens of a request, as answers count them.

Protocol: fields are vLLM's, in its order. Tokens that the prefix cache had are in `prompt_tokens_details`
where the server was started with --enable-prompt-tokens-details, and those of reasoning in
`completion_tokens_details` where a parser looks for reasoning. Else both are null, and left out of the last
chunk of a stream.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Usage:
    """Tokens of a request, or of one of its choices. `cached`, `reasoning`: None if they are not told."""
    prompt: int
    completion: int
    cached: int | None = None
    reasoning: int | None = None

    def fields(self, whole: bool = True) -> dict[str, Any]:
        """Returns the usage in an answer; not `whole` without what is null."""
        counts = {"prompt_tokens": self.prompt, "total_tokens": self.prompt + self.completion,
                  "completion_tokens": self.completion}
        told = {"prompt_tokens_details": ("cached_tokens", self.cached),
                "completion_tokens_details": ("reasoning_tokens", self.reasoning)}
        details = {name: None if count is None else {key: count} for name, (key, count) in told.items()}
        return counts | {name: each for name, each in details.items() if whole or each is not None}
