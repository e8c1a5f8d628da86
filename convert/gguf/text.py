"""The tokenizer and the chat template of a GGUF file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufText:
    """Tokenizer and chat template.

    Attributes:
      tokenizer: the tokenizer.
      chat_template: the template, several by name, or None.
      special_tokens: special tokens by their names in templates.
    """

    tokenizer: Tokenizer
    chat_template: str | Mapping[str, str] | None
    special_tokens: Mapping[str, str]
