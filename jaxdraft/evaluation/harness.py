"""The model of lm-eval-harness: requests as text in, log-likelihoods and texts out.

Tokens, truncation and stop strings are treated as by lm-eval's own model for transformers, so that
both give the same numbers for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from jaxdraft.checks import check_int
from jaxdraft.engine import Engine, Request
from jaxdraft.evaluation.scores import Pair, Scorer
from jaxdraft.load import load, locate
from jaxdraft.model import Model
from jaxdraft.sampling import Sampling
from jaxdraft.text import Text

try:
    from lm_eval.api.model import LM as _Base
    from lm_eval.api.registry import register_model

    INSTALLED = True
except ImportError:
    INSTALLED = False
    _Base = object

    def register_model(name: str) -> Any:
        """Return a decorator that changes nothing: there is no registry."""
        del name
        return lambda model: model


_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")


@register_model("jaxdraft")
class LM(_Base):  # type: ignore[misc, valid-type]
    """A model for lm-eval: ``lm_eval.simple_evaluate(LM("folder"), tasks=[...])``.

    Args:
      pretrained: a loaded model, or a folder or repository for :func:`jaxdraft.load`.
      dtype: as for :func:`jaxdraft.load`.
      revision: as for :func:`jaxdraft.load`.
      drafter: as for :class:`jaxdraft.Engine`; it never changes greedy answers.
      draft_tokens: as for :class:`jaxdraft.Engine`.
      batch_size: rows that run at once; "auto" means 8.
      max_length: largest number of tokens that the model reads. Default: its context.
      max_gen_toks: tokens to generate where a task does not state them.
      prefix_token: token before a text without a context. Default: the one for the beginning of a
        text, else for its end.
      seed: seed of sampled answers.
      device: has no effect: JAX chooses the device (``JAX_PLATFORMS``), and lm-eval's command line
        always passes one, by default that of a GPU.
      max_batch_size: must be None: the batch is fixed.

    Raises:
      ValueError: the model has no tokenizer or no end of text, or a value is out of range.
    """

    def __init__(
        self,
        pretrained: str | Model,
        *,
        dtype: str | None = None,
        revision: str | None = None,
        drafter: Any = "auto",
        draft_tokens: int | None = None,
        batch_size: int | str = 8,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        prefix_token: int | None = None,
        seed: int = 0,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        if INSTALLED:
            super().__init__()
        del device
        if max_batch_size is not None:
            raise ValueError(
                f"max_batch_size is {max_batch_size!r}; expected None: a batch has batch_size rows"
            )
        if isinstance(pretrained, Model):
            self.model = pretrained
        else:
            self.model = load(locate(pretrained, revision), dtype=dtype)
        if self.model.text is None:
            raise ValueError(f"{self.model.info.name} has no tokenizer; lm-eval's tasks are texts")
        self.text: Text = self.model.text
        rows = 8 if str(batch_size) == "auto" else check_int("batch_size", int(batch_size))
        self.scorer = Scorer(self.model, batch=rows, max_length=max_length)
        self.max_length, self.max_gen_toks = self.scorer.max_length, max_gen_toks
        self.batch_size, self.seed = rows, seed
        self.eot_token_id = _end_of_text(self.text)
        begin = _special(self.text, "bos_token")
        chosen = begin if begin is not None else self.eot_token_id
        self.prefix_token_id = chosen if prefix_token is None else prefix_token
        self._drafts: dict[str, Any] = dict(drafter=drafter, draft_tokens=draft_tokens)
        self._engine: Engine | None = None

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for lm-eval's cache of requests."""
        return self.text.source.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the chat template, or None if ``chat_template`` is false."""
        if not chat_template:
            return None
        found = self.text.chat_template
        if isinstance(found, Mapping):
            return found[chat_template if isinstance(chat_template, str) else "default"]
        return found

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation."""
        return self.text.render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    # ------------------------------------------------------------------ requests

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one.

        Args:
          requests: with ``args`` (context, continuation).
          disable_tqdm: whether to show no progress.

        Raises:
          ValueError: a continuation without a token, or longer than the model's context.
        """
        pairs = [self._pair(*request.args) for request in requests]
        with _Progress("log-likelihoods", len(pairs), disable_tqdm) as bar:
            found = self.scorer.continuations(pairs, bar.advance)
        for request, answer in zip(requests, found, strict=True):
            self._cache("loglikelihood", request.args, answer)
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, in windows with as much context as fits.

        Args:
          requests: with ``args`` (text,).
          disable_tqdm: whether to show no progress.
        """
        prefix = self.prefix_token_id
        windows = [self.scorer.windows(self._encode(r.args[0]), prefix) for r in requests]
        flat = [pair for pairs in windows for pair in pairs]
        with _Progress("windows", len(flat), disable_tqdm) as bar:
            scores = iter(self.scorer.continuations(flat, bar.advance))
        found = [sum((next(scores)[0] for _ in pairs), 0.0) for pairs in windows]
        for request, answer in zip(requests, found, strict=True):
            self._cache("loglikelihood_rolling", request.args, answer)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the texts after the contexts, each before the first of its stop strings.

        Sampled requests draw by their place among the requests.

        Args:
          requests: with ``args`` (context, options). Options: ``until``, ``max_gen_toks`` (or one
            of its other names), ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``min_p`` and
            ``repetition_penalty``.
          disable_tqdm: whether to show no progress.

        Raises:
          ValueError: an unknown option, or no room for a context.
        """
        asked = [self._options(number, *request.args) for number, request in enumerate(requests)]
        if self._engine is None:
            self._engine = Engine(
                self.model, max_batch=self.batch_size, context=self.max_length, **self._drafts
            )
        engine, running = self._engine, list[Request]()
        try:
            for ids, options in asked:
                running.append(engine.submit(ids, **options))
            with _Progress("texts", len(running), disable_tqdm) as bar:
                engine.wait(
                    lambda: all(one.finished for one in running),
                    lambda: bar.reach(sum(one.finished for one in running)),
                )
            found = [
                self._answer(one.result(), options)
                for one, (_, options) in zip(running, asked, strict=True)
            ]
        finally:
            for one in running:
                one.close()
        for request, answer in zip(requests, found, strict=True):
            self._cache("generate_until", request.args, answer)
        return found

    # ------------------------------------------------------------------ parts

    def _encode(self, text: str, special: bool | None = None) -> list[int]:
        """Return ids; by default with special tokens unless the text begins with its first."""
        if special is None:
            prefix = self.text.decode([self.prefix_token_id], skip_special_tokens=False)
            special = not text.startswith(prefix)
        return self.text.encode(text, add_special_tokens=special)

    def _pair(self, context: str, continuation: str) -> Pair:
        """Return the ids of a context and of its continuation.

        Both are encoded as one text, with the spaces between them, as the model would read it.
        """
        if not context:
            ids = self._encode(continuation, special=False)
            known = ids[:1] == [self.prefix_token_id]
            return (ids[:1], ids[1:]) if known else ([self.prefix_token_id], ids)
        bare = context.rstrip()
        whole = self._encode(context + continuation)
        before = self._encode(bare)
        return before, whole[len(before) :]

    def _options(
        self, number: int, context: str, options: Mapping[str, Any]
    ) -> tuple[list[int], dict[str, Any]]:
        """Return the ids of a context that leave room, and the options of its request."""
        known = ("until", "do_sample", "temperature", *_LENGTHS, *_SAMPLING)
        if unknown := sorted(set(options) - set(known)):
            raise ValueError(f"request {number} has {unknown}; expected options from {known}")
        sizes = [options[name] for name in _LENGTHS if options.get(name) is not None]
        size = check_int("max_gen_toks", sizes[0] if sizes else self.max_gen_toks)
        room = self.max_length - size
        if room < 1:
            raise ValueError(
                f"request {number} generates {size} tokens; the context of {self.max_length} "
                "leaves no room for its text"
            )
        ids = self._encode(context) or [self.prefix_token_id]
        until = options.get("until") or []
        stop = [until] if isinstance(until, str) else list(until)
        temperature = float(options.get("temperature") or 0.0)
        if options.get("do_sample", temperature > 0) and temperature == 0:
            temperature = 1.0
        if not options.get("do_sample", True):
            temperature = 0.0
        numbers = {name: options[name] for name in _SAMPLING if options.get(name) is not None}
        sampling = Sampling(temperature=temperature, **numbers)
        plain = temperature == 0 and numbers.get("repetition_penalty", 1) == 1
        ends = dict.fromkeys((*self.model.info.stop_ids, self.eot_token_id))
        return ids[-room:], dict(
            max_new_tokens=size,
            stop=tuple(filter(None, stop)),
            stop_ids=tuple(ends),
            sampling=None if plain else sampling,
            key=self.seed,
            row=number,
        )

    def _answer(self, tokens: list[int], options: Mapping[str, Any]) -> str:
        """Return the text of an answer, decoded without its prompt, before its stop strings."""
        text = self.text.decode(tokens)
        end = self.text.decode([self.eot_token_id], skip_special_tokens=False)
        for term in (*options["stop"], end):
            text = text.split(term)[0]
        return text

    def _cache(self, kind: str, arguments: Iterable[Any], answer: Any) -> None:
        if INSTALLED:
            self.cache_hook.add_partial(kind, arguments, answer)


def check_installed() -> None:
    """Check that lm-eval is there.

    Raises:
      ValueError: it is not installed.
    """
    if not INSTALLED:
        raise ValueError("lm-eval is not installed: pip install 'jaxdraft[eval]'")


def evaluate(
    model: LM, tasks: Sequence[str], *, include_path: str | None = None, **options: Any
) -> tuple[dict[str, Any], str]:
    """Run tasks of lm-eval.

    Args:
      model: the model.
      tasks: names of tasks or groups.
      include_path: a folder with further tasks.
      **options: those of ``lm_eval.simple_evaluate``, for example ``limit`` and ``num_fewshot``.

    Returns:
      The results as lm-eval gives them, and a table of them in Markdown.

    Raises:
      ValueError: lm-eval is not installed.
    """
    check_installed()
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    found = lm_eval.simple_evaluate(
        model=cast(Any, model),
        tasks=list(tasks),
        task_manager=TaskManager(include_path=include_path),
        **options,
    )
    assert found is not None
    return found, make_table(found)


class _Progress:
    """A bar on stderr, on a terminal."""

    def __init__(self, label: str, total: int, disable: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (label, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        hidden = disable or not console.is_terminal
        self._bar = Progress(*columns, console=console, disable=hidden)
        self._task = self._bar.add_task(label, total=total)

    def advance(self, count: int) -> None:
        """Count further finished requests."""
        self._bar.advance(self._task, count)

    def reach(self, count: int) -> None:
        """Set the number of finished requests."""
        self._bar.update(self._task, completed=count)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _special(text: Text, name: str) -> int | None:
    """Return the id of a named special token, if there is one."""
    token = text.special_tokens.get(name)
    return None if token is None else text.tokenizer.token_to_id(token)


def _end_of_text(text: Text) -> int:
    found = _special(text, "eos_token")
    if found is None:
        raise ValueError(f"{text.source} names no eos_token; lm-eval ends texts with it")
    return found


def main() -> None:
    """Run lm-eval's own command line, which then knows the model ``jaxdraft``."""
    check_installed()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
