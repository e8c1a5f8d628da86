"""Continuous batching: many requests, each with its own rules, around the same round."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import fields, replace
from typing import Any, ClassVar

import jax

from jaxdraft.base import Drafter, full_drafter, full_target
from jaxdraft.checks import check_int
from jaxdraft.draft.none import NoDrafter
from jaxdraft.engine.counters import Counters
from jaxdraft.engine.faults import Blame, Faults
from jaxdraft.engine.pages import Pages
from jaxdraft.engine.programs import Buckets
from jaxdraft.engine.request import EngineEvent, Request
from jaxdraft.engine.results import Results
from jaxdraft.engine.rules import check_rules
from jaxdraft.engine.runner import Runner, pool_pages
from jaxdraft.engine.scheduler import Scheduler, Work
from jaxdraft.engine.sequence import Phase, RequestRules, Sequence
from jaxdraft.engine.threads import FairLock, Readers, Waiters, exclusive
from jaxdraft.guard import check_form, check_target
from jaxdraft.model import Model
from jaxdraft.plan import MAX_BATCH
from jaxdraft.prompts import one_prompt
from jaxdraft.requests import Options
from jaxdraft.sampling import Sampling
from jaxdraft.sizes import PREFILL_CHUNK
from jaxdraft.structure import Structured
from jaxdraft.telemetry import Summary

PAGE_SIZE = 64
"""Default number of slots per page. Prefixes are shared in steps of this many tokens."""


class Engine:
    """Runs many requests at once, each as if it were alone.

    A request yields the same tokens as ``generate(model, [prompt], key=key, ...)``, whatever runs
    beside it, whenever it is submitted, and however often it is preempted. Shapes are few and
    fixed. The host decides at every step which requests run:

        engine = jaxdraft.Engine(model, max_batch=8, memory="12GiB")
        request = engine.submit("Once upon a time", max_new_tokens=100)
        for event in engine.run():
            print(event.request.number, event.tokens, event.finish_reason)

    Any thread may call any method at any time. Calls are served in the order of arrival; a step is
    one call. Threads that wait for results share the work: one of them runs the steps while the
    others sleep. Only the events are limited to one reader: while a thread iterates over
    :meth:`run`, :meth:`run` and :meth:`step` in another thread raise ``RuntimeError``. Other
    threads can still wait for results.

    A model on a mesh runs on all of its devices: heads are divided over the one axis, requests over
    the other. ``max_batch`` and ``pages`` are then divided, too, and ``memory`` is that of a
    device.

    Targets and drafters with an ``init_pool`` share a pool of pages; for all others, every row has
    its own full state. Page tables and reference counts are kept on the host. A step receives its
    tables as one array and never allocates a page itself.

    Args:
      model: from :func:`jaxdraft.load` or ``Model.of``.
      max_batch: rows that run at once.
      memory: bytes, or a string like ``"12GiB"``, for weights and state together.
      pages: P, pages of the pool, instead of ``memory``. Default: all rows at full context.
      page_size: Z, positions per page.
      context: positions of the longest sequence. Default: the model's context.
      drafter: as in :func:`jaxdraft.generate`.
      draft_tokens: as in :func:`jaxdraft.generate`.
      chunk: maximum number of tokens of one prompt per step.
      budget: maximum number of prompt tokens per step, over all requests. Default: two chunks.
      prefix_cache: whether full pages are cached by content and reused.
      checkpoints: maximum number of row states cached beside pages, where a prefix needs one:
        recurrent layers, windows, MTP heads. Default: two per row if they are needed. They count
        towards ``memory``.
      buckets: sizes that programs are compiled for.

    Raises:
      ShardingError: a ``ValueError``; the model is on devices of several processes, or sizes do not
        divide by the rows of devices of its mesh.
      ValueError: if the sizes do not fit, as in :func:`jaxdraft.plan`.
    """

    _over_rows: ClassVar[type[Engine]]  # for several rows of devices; parallel.py sets it

    def __new__(cls, model: Model, **_: Any) -> Engine:
        """Return an engine of the kind that the model's mesh needs."""
        placement = full_target(model.target).placement
        if placement is not None:
            placement.check_local()
        if cls is Engine and placement is not None and placement.rows > 1:
            return object.__new__(cls._over_rows)
        return object.__new__(cls)

    def __init__(
        self,
        model: Model,
        *,
        max_batch: int = MAX_BATCH,
        memory: int | str | None = None,
        pages: int | None = None,
        page_size: int = PAGE_SIZE,
        context: int | None = None,
        drafter: str | Drafter = "auto",
        draft_tokens: int | None = None,
        chunk: int = PREFILL_CHUNK,
        budget: int | None = None,
        prefix_cache: bool = True,
        checkpoints: int | None = None,
        buckets: Buckets | None = None,
    ) -> None:
        self.lock, self.waiters = FairLock(), Waiters()
        self._readers = Readers()
        self.model = model
        check_target(model.target)
        self.drafter = model.choose(drafter, draft_tokens)
        self._named = drafter if isinstance(drafter, str) else None
        self.draft_tokens = self.drafter.draft_tokens
        self.max_batch = rows = check_int("max_batch", max_batch)
        longest = model.info.context_length
        self.context = longest if context is None else check_int("context", context)
        if self.context > longest:
            raise ValueError(f"context is {context}; the model's has {longest} positions")
        if check_int("chunk", chunk) > PREFILL_CHUNK:
            raise ValueError(f"chunk is {chunk}; expected at most {PREFILL_CHUNK}")
        columns = -(-self.context // check_int("page_size", page_size))
        most = 2 * rows if checkpoints is None else check_int("checkpoints", checkpoints, 0)
        count = pool_pages(
            replace(model, drafter=self.drafter),
            rows=rows, columns=columns, page_size=page_size, context=self.context,
            memory=memory, pages=pages, checkpoints=most if prefix_cache else 0,
        )  # fmt: skip
        self._sizes: dict[str, Any] = dict(
            batch=rows,
            pages=count,
            page_size=page_size,
            columns=columns,
            context=self.context,
            buckets=buckets or Buckets.of(max_batch=rows, chunk=chunk, columns=columns),
        )
        self.runner = runner = Runner(model.target, self.drafter, **self._sizes)
        needs = runner.paged and not runner.skips
        self.scheduler = Scheduler(
            rows=rows,
            pages=Pages(count if runner.paged else 0, page_size),
            lookahead=self.draft_tokens if runner.drafter_paged else 0,
            chunk=chunk,
            budget=2 * chunk if budget is None else check_int("budget", budget),
            prefixes=prefix_cache and (not needs or most > 0),
            checkpointed=needs,
            checkpoints=most if needs else 0,
            overlap=full_drafter(self.drafter).overlap,
        )
        self._faults, self._counters = Faults(), Counters(self.draft_tokens)
        self._results = Results(
            self.scheduler,
            self._counters,
            self._faults,
            text=model.text,
            drafts=self.draft_tokens > 0,
            save=lambda sequence: self.runner.save(sequence),
        )
        self._number, self._order = itertools.count(), itertools.count()
        self._closed = False

    # ------------------------------------------------------------------ requests

    @exclusive
    def submit(
        self,
        prompt: str | Ids[int],
        *,
        max_new_tokens: int = 128,
        stop_ids: Ids[int] | None = None,
        draft_limit: int | None = None,
        max_length: int | None = None,
        sampling: Sampling | None = None,
        key: jax.Array | int | None = None,
        stop: str | Ids[str] = (),
        structure: Structured | None = None,
        logprobs: int | None = None,
        keep: bool = False,
        row: int = 0,
    ) -> Request:
        """Submit a request, which runs when there is room.

        Args:
          prompt: a string or ids.
          max_new_tokens: maximum number of tokens to emit.
          stop_ids: tokens that end the request; they are emitted. Default: those of the model.
            ``()`` means none.
          draft_limit: maximum number of drafts per round; 0 means none.
          max_length: maximum length of the sequence, prompt included. Default: the engine's
            context.
          sampling: sampling options; see :class:`jaxdraft.Sampling`. Default: greedy decoding.
          key: a PRNG key, or a seed for one; required above temperature zero. The request draws
            the same numbers as row ``row`` of ``generate(..., key=key)``.
          stop: strings that end the request, as in :func:`jaxdraft.generate`.
          structure: texts that the output must be, as in :func:`jaxdraft.generate`. Structures of
            similar size share a program.
          logprobs: number of alternatives per token to return log-probabilities for, beside
            that of the token itself.
          keep: whether the cache stays in place after the request ends, until the room is needed,
            so that :meth:`extend` continues from there.
          row: see ``key``.

        Raises:
          ValueError: as in :func:`jaxdraft.generate`, or if the request does not fit into the pool
            even alone. Other requests are not affected.
        """
        self._usable()
        options = Options(
            max_new_tokens=max_new_tokens, stop_ids=stop_ids, draft_limit=draft_limit, row=row,
            max_length=max_length, sampling=sampling, key=key, stop=stop, logprobs=logprobs,
            structure=structure,
        )  # fmt: skip
        ids = one_prompt(self.model, prompt)
        rules = self._rules(len(ids), options)
        number = next(self._number)
        sequence = Sequence(number, ids, options, rules, keep=keep, counters=self._counters)
        request = Request(self, sequence)
        self._queue(request)
        return request

    @exclusive
    def extend(self, request: Request, tokens: str | Ids[int], **rules: Any) -> Request:
        """Continue a finished request with another turn: more tokens after all that it holds.

        The output equals that of a new request with the whole text as its prompt. The kept part
        of the cache is not recomputed.

        Args:
          request: a finished request that is not closed.
          tokens: a string or ids that follow its output.
          **rules: options as in :meth:`submit`; those not given are unchanged.

        Raises:
          ValueError: if the request is unfinished, closed or failed, or as in :meth:`submit`.
        """
        self._usable()
        sequence = request._sequence
        if sequence.phase is not Phase.DONE or sequence.error is not None:
            raise ValueError(f"{request!r} cannot be continued: expected a finished request")
        names = [field.name for field in fields(Options)]
        if unknown := set(rules) - set(names):
            raise ValueError(f"unknown rules {sorted(unknown)}; expected {names}")
        options = replace(sequence.options, **rules)
        ids = one_prompt(self.model, tokens)
        found = self._rules(len(sequence.ids) + len(ids), options)
        sequence.begin(ids, options, found)
        self._queue(request)
        return request

    @exclusive
    def rewind(self, request: Request) -> Request:
        """Remove the last turn, input and output; :meth:`extend` then continues from there.

        Raises:
          ValueError: if the request is unfinished or closed.
        """
        self._usable()
        sequence = request._sequence
        if sequence.phase is not Phase.DONE:
            raise ValueError(f"{request!r} cannot be rewound: expected a finished request")
        turn = sequence.unwind()
        # The last token before the turn is in no cache yet, so it is read with the next tokens.
        positions = min(sequence.read, max(turn.start - 1, 0))
        kept = sequence.number in self.scheduler.kept
        if not kept or not positions or (self.scheduler.checkpointed and turn.checkpoint is None):
            self.scheduler.free(sequence)
        else:
            sequence.checkpoint = turn.checkpoint
            self.scheduler.truncate(sequence, positions)
        return request

    def map(
        self,
        prompts: Iterable[str | Ids[int]],
        *,
        key: jax.Array | int | None = None,
        n: int = 1,
        progress: bool = False,
        **rules: Any,
    ) -> list[Request]:
        """Run n requests for every prompt, and return them in order.

        Request i draws the same numbers as row i of ``generate(prompts, key=key, n=n)``. The pages
        of a prompt are computed once and shared, if prefixes are cached.

        Args:
          prompts: strings, or lists of ids.
          key: as in :meth:`submit`.
          n: samples per prompt, side by side in the result.
          progress: whether to show a progress bar.
          **rules: as in :meth:`submit`.

        Raises:
          ValueError: as in :meth:`submit`, with the prompt's number; then no request runs.
        """
        requests: list[Request] = []
        check_int("n", n)
        try:
            for number, prompt in enumerate(prompts):
                try:
                    for row in range(number * n, (number + 1) * n):
                        requests.append(self.submit(prompt, key=key, row=row, **rules))
                except ValueError as error:
                    raise ValueError(f"prompt {number}: {error}") from error
        except BaseException:
            for request in requests:
                request.close()
            raise
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = ("requests", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=not progress) as bar:
            task = bar.add_task("requests", total=len(requests))
            self.wait(
                lambda: all(r.finished for r in requests),
                lambda: bar.update(task, completed=sum(r.finished for r in requests)),
            )
        return requests

    @exclusive
    def update(self, model: Model, drafter: str | Drafter | None = None) -> None:
        """Replace the weights of the target and of the drafter. Nothing is compiled.

        Unfinished requests keep their tokens and continue with the new weights: their texts are
        read again, as after a preemption. To finish them with the old weights, run the engine until
        nothing is left to do first. Cached prefixes, and what finished requests kept, are dropped.

        Whatever the drafter is, all further tokens are those of the new target. A drafter that was
        switched off by a fault stays off.

        Args:
          model: a model of the same form: the same shapes, types and settings, on the same devices.
          drafter: as for :class:`Engine`; of the same form as the engine's. Default: the model's
            if the engine's was chosen by name, else the engine's own.

        Raises:
          ValueError: target or drafter have another form. Nothing has changed.
        """
        chosen = self._checked(model, drafter)
        self.scheduler.restart()
        self._counters.restart()
        self.model, self.drafter = model, chosen
        if self.drafter_fault is not None:
            chosen = self.runner.drafter
        self.runner.update(model.target, chosen)

    @exclusive
    def cancel(self, request: Request) -> None:
        """End a request now and keep the emitted tokens. A finished request is left unchanged."""
        if not request.finished:
            self._results.cut_short(request._sequence, "cancelled")

    @exclusive
    def release(self, request: Request) -> None:
        """End a request if it runs, and free everything it holds. Repeated calls have no effect."""
        self.cancel(request)
        self.scheduler.free(request._sequence)
        request._sequence.phase = Phase.CLOSED

    @exclusive
    def close(self) -> None:
        """End all requests and release all arrays."""
        if self._closed:
            return
        for request in list(self._results.handles.values()):
            self.release(request)
        for sequence in list(self.scheduler.kept.values()):
            self.scheduler.free(sequence)
            sequence.phase = Phase.CLOSED
        self.scheduler.cache.clear()
        self._closed = True
        del self.runner

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ running

    @property
    @exclusive
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._results.events) or self.scheduler.busy

    def run(self) -> Iterator[EngineEvent]:
        """Step until nothing is left to do. Requests may be submitted meanwhile.

        Raises:
          RuntimeError: another thread iterates over the events.
        """
        reader = object()
        try:
            while self._reads(reader):
                yield from self.step()
        finally:  # perhaps in the garbage collector, where no lock may be taken
            self._readers.leave(reader)

    __iter__ = run

    @exclusive
    def _reads(self, reader: object) -> bool:
        """Make ``reader`` the only reader of events, and return whether any will follow."""
        self._readers.claim(reader)
        return self.busy

    @exclusive
    def step(self) -> list[EngineEvent]:
        """Run one round of every running request, and the next part of some prompts.

        A step that fails on the device loses no tokens: its requests are recomputed one by one
        until the cause is found. If it is the drafter, the drafter is switched off for the rest of
        the run. If it is a request, the request ends with ``finish_reason`` ``"failed"`` and the
        error. Any other error is raised, and the next step continues.

        Returns:
          Events, one for every request that received tokens or ended, in order of arrival.

        Raises:
          RuntimeError: another thread iterates over the events.
        """
        self._usable()
        self._readers.refuse()
        self._advance()
        return self._results.take()

    def wait(self, done: Callable[[], bool], after: Callable[[], Any] = lambda: None) -> None:
        """Step until something is done, or sleep while another thread that waits steps.

        Args:
          done: function that returns whether the wait is over.
          after: called after every step.

        Raises:
          RuntimeError: a step failed in another thread that waited; its cause is that error.
        """
        self.waiters.until(done, lambda: self._step_unread(done), after)

    @exclusive
    def _step_unread(self, done: Callable[[], bool]) -> None:
        """Step for a waiting thread, and keep the events only if there is a reader."""
        if done():  # since the thread began to wait for the lock
            return
        self._usable()
        self._advance()
        if not self._readers:
            self._results.events.clear()

    def _advance(self) -> None:
        """Run a step, and add its events to the unread ones."""
        failure: Exception | None = None
        try:
            work = self.scheduler.next_step(self._faults.suspect())
            try:
                reports = self.runner.run(work, self.scheduler.active)
            except Exception as error:
                failure = error
            else:
                self._results.report(work, *reports)
        except BaseException:
            self._recover()
            raise
        if failure is not None:
            self._recover()
            self._blame(work, failure)

    # ------------------------------------------------------------------ queries

    @property
    def programs(self) -> int:
        """Number of programs used so far; each combination of program and shapes counts once."""
        return len(self.runner.compiled)

    @property
    def faults(self) -> int:
        """Number of steps that failed on the device."""
        return self._faults.count

    @property
    def last_fault(self) -> BaseException | None:
        """The error of the last failed step."""
        return self._faults.last

    @property
    def drafter_fault(self) -> BaseException | None:
        """The error that caused the drafter to be switched off, if any."""
        return self._faults.drafter

    @exclusive
    def summary(self) -> Summary:
        """Return counters of everything so far, over all requests."""
        running = [sequence.now for sequence in self.scheduler.active.values()]
        return self._counters.summary(running, 0 if self._closed else self.runner.misses)

    @exclusive
    def check(self) -> None:
        """Check all invariants of pages, rows and prefixes, and that device and host agree.

        Raises:
          AssertionError: if an invariant does not hold.
        """
        self.scheduler.check()
        if not self._closed:
            self.runner.check(self.scheduler.active, self.scheduler.stopping)

    # ------------------------------------------------------------------ fault handling

    def _recover(self) -> None:
        """Reset after a step that failed half-way, since the device state cannot be trusted."""
        self.scheduler.restart()
        self._counters.restart()
        self.runner.reset()

    def _blame(self, work: Work, error: BaseException) -> None:
        """Handle a failed step; no sequence has a row at this point."""
        part = [*work.running, *(sequence for sequence, _ in work.reading)]
        blame = self._faults.failed(part, error, drafts=self.draft_tokens > 0)
        if blame is Blame.DRAFTER:
            self._draft(NoDrafter())
        elif blame is Blame.SEQUENCE:
            if self.drafter_fault is None:
                self._draft(self.drafter)
            self._results.cut_short(part[0], "failed", error)

    def _draft(self, drafter: Drafter) -> None:
        """Switch to another drafter; no sequence has a row at this point."""
        if self.runner.drafter is not drafter:
            seen = self.runner.compiled
            self.runner = Runner(self.model.target, drafter, **self._sizes)
            self.runner.compiled |= seen

    # ------------------------------------------------------------------ helpers

    def _checked(self, model: Model, drafter: str | Drafter | None) -> Drafter:
        """Return the drafter that goes with a model that replaces the engine's, both checked."""
        self._usable()
        wanted = self._named if drafter is None else drafter
        chosen = self.drafter if wanted is None else model.choose(wanted, self.draft_tokens)
        check_form("target", self.model.target, model.target)
        check_form("drafter", self.drafter, chosen)
        return chosen

    def _usable(self) -> None:
        if self._closed:
            raise ValueError("the engine is closed")

    def _queue(self, request: Request) -> None:
        if not self.scheduler.busy:
            self.runner.table.start()
        request._sequence.order = next(self._order)
        self._results.handles[request.number] = request
        self.scheduler.add(request._sequence)

    def _rules(self, length: int, options: Options) -> RequestRules:
        """Return the rules of a request, checked before it is queued."""
        rules = check_rules(self.model, self.draft_tokens, self.context, length, options)
        pages = self.scheduler.pages
        needed = pages.needed(length + rules.max_new_tokens - 1)
        if pages.count and needed > pages.count:
            raise ValueError(
                f"{length} prompt tokens and {rules.max_new_tokens} new ones need {needed} pages "
                f"of {pages.size}; the pool has {pages.count}"
            )
        return rules


__all__ = ["Engine"]
