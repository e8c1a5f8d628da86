"""Structured output: regular expressions, JSON schemas and choices that a text must follow.

    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    out = jaxdraft.generate(model, prompts, structure=jaxdraft.Structure.json_schema(schema))

The library `outlines-core` compiles an expression to an automaton over bytes. Here it becomes an
automaton over the tokens of a model (:mod:`jaxdraft.structure.automaton`), which a round runs on
the device. See ``docs/structured_output.md``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdraft.structure.automaton import MAX_STATES, NO_STRUCTURE, REFUSED, TokenAutomaton
from jaxdraft.structure.schema import Schema, write_out
from jaxdraft.text import Text

DEPTH = 3
"""Default of the number of times that a recursive reference of a schema is followed."""

_IN_STRING = [b for b in range(256) if b >= 0x20 and b not in b'"\\']
"""Bytes that a JSON string may hold as they are."""


@dataclasses.dataclass(frozen=True)
class Structure:
    """Texts that an output may be: all that a regular expression matches, from start to end.

    Structures with the same expression are equal. An expression is compiled once per tokenizer.

    Attributes:
      pattern: a regular expression in the syntax of Rust's `regex` crate, without anchors.
      source: description for messages.
    """

    pattern: str
    source: str = dataclasses.field(default="", compare=False)

    @classmethod
    def regex(cls, pattern: str) -> Structure:
        """Return the texts that a regular expression matches as a whole.

        Raises:
          ValueError: the pattern cannot be compiled: look-around, back-references, word boundaries
            and anchors are not regular.
        """
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"regular expression is {pattern!r}; expected a string, not empty")
        made = cls(pattern, f"regular expression {pattern!r}")
        _bytes_of(made.pattern, made.source)
        return made

    @classmethod
    def json_schema(cls, schema: Schema | str | Path, *, depth: int = DEPTH) -> Structure:
        """Return the JSON texts that satisfy a schema.

        Args:
          schema: a schema as Python values or as JSON text, or the path of a file.
          depth: number of times that a recursive reference is followed inside itself.

        Raises:
          ValueError: not JSON, a keyword that is not supported, or no finite text.
        """
        if isinstance(schema, Path):
            schema = schema.read_text("utf-8")
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except json.JSONDecodeError as error:
                raise ValueError(f"the schema is not JSON: {error}") from error
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise ValueError(f"depth is {depth!r}; expected a number of at least 0")
        whole, patterns = write_out(schema, depth)
        for where, pattern in patterns:
            steps, _ = _bytes_of(pattern, where)
            outside = [b for b in range(256) if b not in _IN_STRING and (steps[:, b] >= 0).any()]
            if outside:
                raise ValueError(
                    f"{where} is {pattern!r}, which matches {chr(outside[0])!r}: that would end a "
                    r'JSON string or need an escape; exclude it, as in [^"\\\x00-\x1f]'
                )
        made = cls(_library().json_schema.build_regex_from_schema(json.dumps(whole)), "JSON schema")
        _bytes_of(made.pattern, made.source)
        return made

    @classmethod
    def json(cls) -> Structure:
        """Return JSON values of any kind, with arrays and objects inside each other twice."""
        return cls.json_schema({})

    @classmethod
    def choice(cls, choices: Iterable[str]) -> Structure:
        """Return a few texts, one of which the output is.

        Raises:
          ValueError: there is no text, or an empty one.
        """
        texts = [choices] if isinstance(choices, str) else list(choices)
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"choices are {texts!r}; expected strings, none of them empty")
        made = cls("|".join(map(_escaped, dict.fromkeys(texts))), f"choices {texts!r}")
        _bytes_of(made.pattern, made.source)
        return made

    def automaton(self, text: Text, vocab_size: int) -> TokenAutomaton:
        """Return the automaton over the tokens of a model.

        Args:
          text: the model's tokenizer.
          vocab_size: V.

        Raises:
          ValueError: the vocabulary cannot write any of the texts, or the tokens of this tokenizer
            have no bytes of their own.
        """
        return _automaton(self, text, vocab_size)

    def __repr__(self) -> str:
        return f"<Structure: {self.source or self.pattern}>"


Structured = Structure | TokenAutomaton
"""A structure, or an automaton over the tokens of the one model that it is for."""


def compiled(structure: Structured, text: Text | None, vocab_size: int) -> TokenAutomaton:
    """Return the automaton of a structure over the tokens of a model.

    Args:
      structure: a structure, or an automaton over the same vocabulary.
      text: the model's tokenizer, if there is one.
      vocab_size: V.

    Raises:
      ValueError: something else, or as for :meth:`Structure.automaton`.
    """
    if isinstance(structure, TokenAutomaton):
        if structure.classes.shape != (vocab_size,):
            raise ValueError(
                f"the automaton is over {len(structure.classes)} tokens; the model has {vocab_size}"
            )
        return structure
    if not isinstance(structure, Structure):
        raise ValueError(f"structure is {structure!r}; expected a Structure or a TokenAutomaton")
    if text is None:
        raise ValueError(
            "the model has no tokenizer: a Structure needs one, a TokenAutomaton does not"
        )
    return structure.automaton(text, vocab_size)


@functools.lru_cache(maxsize=64)
def _automaton(structure: Structure, text: Text, vocab_size: int) -> TokenAutomaton:
    steps, ends = _bytes_of(structure.pattern, structure.source)
    try:
        return TokenAutomaton.over_bytes(steps, ends, text.token_bytes, vocab_size)
    except ValueError as error:
        raise ValueError(f"{structure.source or structure.pattern}: {error}") from error


@functools.lru_cache(maxsize=64)
def _bytes_of(pattern: str, source: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the automaton of a regular expression over bytes.

    Returns:
      The state after each byte, [S, 256] int32 from state 0 on, and whether the text may end in
      each state, [S] bool.
    """
    library = _library()
    every = library.Vocabulary(256, {bytes([b]): [b] for b in range(256)})
    try:
        index = library.Index(pattern, every)
    except ValueError as error:
        hint = ""
        if "universal start state" in str(error):
            hint = "; leave anchors out, since the whole text must match"
        raise ValueError(f"{source}: {error}{hint}") from error
    transitions, start = index.get_transitions(), index.get_initial_state()
    names = dict.fromkeys([start, *transitions, *index.get_final_states()])
    for after in transitions.values():
        names.update(dict.fromkeys(after.values()))
    if len(names) > MAX_STATES:
        raise ValueError(
            f"{source} has {len(names)} states; expected at most {MAX_STATES}: use smaller counts "
            "of repetitions, or less depth"
        )
    number = {name: place for place, name in enumerate(names)}
    steps = np.full((len(names), 256), REFUSED, np.int32)
    for name, after in transitions.items():
        for byte, target in after.items():
            if byte < 256:  # 256 is the library's end of the text
                steps[number[name], byte] = number[target]
    final = [number[name] for name in index.get_final_states()]
    return steps, np.isin(np.arange(len(names)), final)


def _escaped(text: str) -> str:
    """Return an expression that matches this text alone."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", lambda found: "\\" + found[0], text)


def _library() -> Any:
    try:
        import outlines_core
    except ImportError as error:
        raise ValueError(
            "structured output needs outlines-core: pip install 'jaxdraft[structure]'"
        ) from error
    return outlines_core


def per_row(
    structure: Any, batch: int, text: Text | None, vocab_size: int
) -> tuple[list[TokenAutomaton], np.ndarray] | None:
    """Return the distinct automata of all rows, and the index of each row's, [B] int32.

    Args:
      structure: one for all rows, one per row (None: free text), or None.
      batch: B.
      text: the model's tokenizer.
      vocab_size: V.

    Raises:
      ValueError: another number of structures than rows, or as for :func:`compiled`.
    """
    if structure is None:
        return None
    if isinstance(structure, Structure | TokenAutomaton):
        structure = [structure] * batch
    if not isinstance(structure, Sequence) or isinstance(structure, str):
        raise ValueError(f"structure is {structure!r}; expected a Structure or one per row")
    if len(structure) != batch:
        raise ValueError(f"there are {len(structure)} structures; expected {batch}, one per row")
    automata: dict[int, tuple[int, TokenAutomaton]] = {}
    which = np.full(batch, NO_STRUCTURE, np.int32)
    for row, one in enumerate(structure):
        if one is not None:
            found = compiled(one, text, vocab_size)
            which[row] = automata.setdefault(id(found), (len(automata), found))[0]
    if not automata:
        return None
    return [found for _, found in automata.values()], which


__all__ = ["DEPTH", "Structure", "Structured", "TokenAutomaton", "compiled", "per_row"]
