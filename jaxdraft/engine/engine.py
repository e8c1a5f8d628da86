"""Continuous batching: many requests, each with its own rules, around the same round."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxdraft.base import Drafter, Status
from jaxdraft.draft.none import NoDrafter
from jaxdraft.engine.pages import Pages
from jaxdraft.engine.programs import Buckets, Columns, Report
from jaxdraft.engine.request import Counts, EngineEvent, Phase, Request, RequestRules
from jaxdraft.engine.rules import check_rules
from jaxdraft.engine.runner import Runner, checkpoint_bytes
from jaxdraft.engine.scheduler import Scheduler, Work
from jaxdraft.engine.threads import FairLock, Waiters, exclusive
from jaxdraft.generate import check_ids, encode
from jaxdraft.guard import check_target
from jaxdraft.model import Model
from jaxdraft.nn.decoder import PREFILL_CHUNK
from jaxdraft.plan import MAX_BATCH, plan
from jaxdraft.sampling import Sampling
from jaxdraft.state.budget import parse_memory, whole
from jaxdraft.telemetry import Summary, summarize
from jaxdraft.text import OutputText

PAGE_SIZE = 64
"""Slots of a page where nothing else is said: prefixes are shared in steps of so many tokens."""

_STRIKES = 2
"""Steps that must fail with a request alone before somebody is blamed."""


class Engine:
    """Runs many requests at once, each as if it were alone.

    A request has the tokens of ``generate(model, [prompt], key=key, ...)``, whatever runs beside
    it, whenever it comes, and however often it loses its place. Shapes are few and fixed; who runs
    is decided on the host, step by step:

        engine = jaxdraft.Engine(model, max_batch=8, memory="12GiB")
        request = engine.submit("Once upon a time", max_new_tokens=100)
        for event in engine.run():
            print(event.request.number, event.tokens, event.finish_reason)

    Any thread may call any method at any time: calls take turns in the order in which they come, a
    step being one call. Threads that wait for results share the work: one of them runs the steps,
    the others sleep. Only the events have one reader: while a thread iterates over :meth:`run`,
    :meth:`run` and :meth:`step` in another thread raise ``RuntimeError``, and results can be waited
    for all the same.

    Targets and drafters with an ``init_pool`` share their pages; of others every row has its whole
    state. Page tables and reference counts live here, on the host; a step gets its tables as one
    array and never takes a page itself.

    Args:
      model: from :func:`jaxdraft.load` or ``Model.of``.
      max_batch: rows that run at once.
      memory: bytes, or a string like ``"12GiB"``, for weights and state together.
      pages: P, instead of ``memory``. Default: all rows at full context.
      page_size: Z.
      context: positions of the longest sequence. Default: the model's context.
      drafter: as in :func:`jaxdraft.generate`.
      draft_tokens: as in :func:`jaxdraft.generate`.
      chunk: the most tokens of a prompt that run in one step.
      budget: the most prompt tokens in one step, of all requests. Default: two chunks.
      prefix_cache: remember full pages by what they hold, and use them again.
      checkpoints: the most states of rows that are remembered beside pages, where a prefix needs
        one: recurrent layers, windows, MTP heads. Default: two a row if they are needed. They are
        paid from ``memory``.
      buckets: sizes that programs are compiled for.

    Attributes:
      faults: steps that failed on the device.
      last_fault: why the last of them did.
      drafter_fault: why the drafter was switched off, if it was.

    Raises:
      ValueError: sizes that do not fit, as :func:`jaxdraft.plan`.
    """

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
        self._readers: dict[object, int] = {}  # iterations over the events, and their threads
        self.model = model
        check_target(model.target)
        self.drafter = model.choose(drafter, draft_tokens)
        self.draft_tokens = self.drafter.draft_tokens
        rows = whole("max_batch", max_batch)
        longest = model.info.context_length
        self.context = longest if context is None else whole("context", context)
        if self.context > longest:
            raise ValueError(f"context is {context}; the model's has {longest} positions")
        if whole("chunk", chunk) > PREFILL_CHUNK:
            raise ValueError(f"chunk is {chunk}; expected at most {PREFILL_CHUNK}")
        columns = -(-self.context // whole("page_size", page_size))
        most = 2 * rows if checkpoints is None else whole("checkpoints", checkpoints, 0)
        count = self._pool_size(
            rows, columns, page_size, memory, pages, most if prefix_cache else 0
        )
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
            budget=2 * chunk if budget is None else whole("budget", budget),
            prefixes=prefix_cache and (not needs or most > 0),
            checkpointed=needs,
            checkpoints=most if needs else 0,
            overlap=int(getattr(self.drafter, "overlap", 0)),
        )
        self.faults = 0
        self.last_fault: BaseException | None = None
        self.drafter_fault: BaseException | None = None
        self._number, self._order = itertools.count(), itertools.count()
        self._ready: list[EngineEvent] = []  # not told yet
        self._total = Counts.zeros(self.draft_tokens)
        self._prompts = 0  # prompts whose first token came
        self._forwards = np.zeros(2, np.int64)  # of target and drafter
        self._forwards_at = self._step = np.zeros(2, np.int64)  # as the device last said
        self._closed = False

    # ------------------------------------------------------------------ requests

    @exclusive
    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        stop_ids: Sequence[int] | None = None,
        draft_limit: int | None = None,
        max_length: int | None = None,
        sampling: Sampling | None = None,
        key: jax.Array | int | None = None,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        keep: bool = False,
        row: int = 0,
    ) -> Request:
        """A request that will run when there is room.

        Args:
          prompt: a string or ids.
          max_new_tokens: tokens to emit.
          stop_ids: tokens that end it; they are emitted. Default: the model's; ``()``: none.
          draft_limit: the most drafts it may use in a round; 0: none.
          max_length: the longest sequence, prompt included. Default: the engine's context.
          sampling: how tokens are chosen; see :class:`jaxdraft.Sampling`. Default: greedily.
          key: a PRNG key, or a seed for one; needed above temperature zero. The request draws as
            row ``row`` of ``generate(..., key=key)`` does.
          stop: strings that end it, as in :func:`jaxdraft.generate`.
          logprobs: give log-probabilities of every token, and of so many alternatives.
          keep: leave its cache in place when it is over, as long as nobody needs the room, so that
            :meth:`extend` goes on where it ended.
          row: see ``key``.

        Raises:
          ValueError: as :func:`jaxdraft.generate`, or the request does not fit the pool even alone.
            Other requests are not affected.
        """
        self._usable()
        options = dict(
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            draft_limit=draft_limit,
            max_length=max_length,
            sampling=sampling,
            key=key,
            stop=stop,
            logprobs=logprobs,
            row=row,
        )
        ids = self._ids(prompt)
        request = Request(self, next(self._number), ids, self._rules(len(ids), options), keep)
        request.options = options
        self._queue(request)
        return request

    @exclusive
    def extend(self, request: Request, tokens: str | Sequence[int], **rules: Any) -> Request:
        """Another turn: more tokens after all that a finished request holds.

        Its tokens are those of a new request with the whole text as its prompt. What was kept of
        its cache is not computed again.

        Args:
          request: finished, not closed.
          tokens: what comes after its output.
          **rules: as in :meth:`submit`; those not given stay as they were.

        Raises:
          ValueError: it is not finished, or is closed or failed, or as :meth:`submit`.
        """
        self._usable()
        if request.phase is not Phase.DONE or request.error is not None:
            raise ValueError(f"{request!r} cannot be continued: expected a finished request")
        if unknown := set(rules) - set(request.options):
            raise ValueError(f"unknown rules {sorted(unknown)}; expected {list(request.options)}")
        options = {**request.options, **rules}
        ids = self._ids(tokens)
        found = self._rules(len(request.ids) + len(ids), options)
        request.options = options
        request.begin(ids, found)
        self._queue(request)
        return request

    @exclusive
    def rewind(self, request: Request) -> Request:
        """Forget the last turn, what was given and what was said; :meth:`extend` goes on there.

        Raises:
          ValueError: it is not finished, or is closed.
        """
        self._usable()
        if request.phase is not Phase.DONE:
            raise ValueError(f"{request!r} cannot be rewound: expected a finished request")
        turn = request.unwind()
        # The last token before the turn is in no cache yet: it is read again with what follows.
        positions = min(request.read, max(turn.start - 1, 0))
        kept = request.number in self.scheduler.kept
        if not kept or not positions or (self.scheduler.checkpointed and turn.memory is None):
            self.scheduler.forget(request)
        else:
            request.memory = turn.memory
            self.scheduler.trim(request, positions)
        return request

    def map(
        self,
        prompts: Iterable[str | Sequence[int]],
        *,
        key: jax.Array | int | None = None,
        progress: bool = False,
        **rules: Any,
    ) -> list[Request]:
        """Run a request for every prompt, and return them in order.

        Request i draws as row i of ``generate(prompts, key=key)``.

        Args:
          prompts: strings, or lists of ids.
          key: as in :meth:`submit`.
          progress: show a bar.
          **rules: as in :meth:`submit`.

        Raises:
          ValueError: as :meth:`submit`, with the prompt's number; none of them runs then.
        """
        requests: list[Request] = []
        try:
            for number, prompt in enumerate(prompts):
                try:
                    requests.append(self.submit(prompt, key=key, row=number, **rules))
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
    def cancel(self, request: Request) -> None:
        """End a request now; what was emitted stays. One that is over is left alone."""
        if not request.finished:
            self._cut_short(request, "cancelled")

    @exclusive
    def release(self, request: Request) -> None:
        """End a request if it runs, and give back all it holds. Twice is as good as once."""
        self.cancel(request)
        self.scheduler.forget(request)
        request.phase = Phase.CLOSED

    @exclusive
    def close(self) -> None:
        """End all requests and let go of all arrays."""
        if self._closed:
            return
        scheduler = self.scheduler
        for request in [*scheduler.active.values(), *scheduler.waiting, *scheduler.kept.values()]:
            self.release(request)
        scheduler.cache.clear()
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
        return bool(self._ready) or self.scheduler.busy

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
            self._readers.pop(reader, None)

    __iter__ = run

    @exclusive
    def _reads(self, reader: object) -> bool:
        """Whether a reader of the events has something to come, which is for it alone then."""
        self._refuse_other_readers(reader)
        self._readers[reader] = threading.get_ident()  # an iterator may change threads
        return self.busy

    def _refuse_other_readers(self, reader: object = None) -> None:
        me = threading.get_ident()
        if any(r is not reader and thread != me for r, thread in list(self._readers.items())):
            raise RuntimeError(
                "another thread iterates over this engine's events; wait for request.result() "
                "here, or read the events in one thread"
            )

    @exclusive
    def step(self) -> list[EngineEvent]:
        """One round of every request that runs, and the next part of some prompts.

        A step that fails on the device costs no tokens: its requests are computed anew, one by one,
        until it is known who makes it fail. That may be the drafter, which is then switched off for
        the rest of the run, or a request, which ends with ``finish_reason`` ``"failed"`` and the
        error. Anything else that goes wrong is raised, and the next step goes on.

        Returns:
          An event for every request that received tokens or ended, in order of arrival.

        Raises:
          RuntimeError: another thread iterates over the events.
        """
        self._usable()
        self._refuse_other_readers()
        self._advance()
        events, self._ready = self._ready, []
        return sorted(events, key=lambda e: e.request.order)

    def wait(self, done: Callable[[], bool], after: Callable[[], Any] = lambda: None) -> None:
        """Step until something is done, or sleep while another thread that waits steps.

        Args:
          done: whether it is.
          after: called after every step.

        Raises:
          RuntimeError: a step failed in another thread that waited; its cause is that error.
        """
        self.waiters.until(done, lambda: self._step_unread(done), after)

    @exclusive
    def _step_unread(self, done: Callable[[], bool]) -> None:
        """Step for a thread that waits: the events are for a reader, if there is one."""
        if done():  # since the thread began to wait for the lock
            return
        self._usable()
        self._advance()
        if not self._readers:
            self._ready.clear()

    def _advance(self) -> None:
        """Run a step, and add its events to those that were not read yet."""
        work: Work | None = None
        try:
            work = self.scheduler.plan()
            try:
                running, reading = self.runner.run(work, self.scheduler.active)
            except Exception as error:
                raise _DeviceError from error
            self._absorb(work, running, reading)
        except _DeviceError as error:
            assert work is not None and error.__cause__ is not None
            self._recover()
            self._blame(work, error.__cause__)
        except BaseException:
            self._recover()
            raise

    # ------------------------------------------------------------------ what people ask

    @property
    def programs(self) -> int:
        """Programs asked for so far: a program and its shapes count once."""
        return len(self.runner.compiled)

    @exclusive
    def summary(self) -> Summary:
        """Counters of everything so far, over all requests."""
        counts = self._total
        for request in self.scheduler.active.values():
            counts = counts + request.now
        target, drafter = (int(n) for n in self._forwards)
        counts = replace(counts, target_forwards=target, drafter_forwards=drafter)
        told = summarize(counts.stats(), admission_misses=0 if self._closed else self.runner.misses)
        return replace(told, prompts=self._prompts)

    def tally(self, counts: Counts) -> None:
        """Counters of a request that leaves its row."""
        self._total = self._total + counts

    @exclusive
    def check(self) -> None:
        """All invariants: of pages, rows and prefixes, and that the device agrees with the host.

        Raises:
          AssertionError: one does not hold.
        """
        scheduler = self.scheduler
        scheduler.check()
        if self._closed:
            return
        state = self.runner.state
        status, length = jax.device_get((state.status, state.length))
        for row in range(scheduler.rows):
            request, runs = scheduler.active.get(row), status[row] == Status.RUNNING
            if request is None:
                assert not runs or row in scheduler.stopping, f"row {row} runs for nobody"
            elif request.phase is Phase.RUNNING:
                assert runs and length[row] == len(request.ids), (request, status[row], length[row])
                assert request.read == len(request.ids) - 1, (request, request.read)
            else:
                assert not runs and length[row] == request.read, (request, length[row])

    # ------------------------------------------------------------------ after a step

    def _absorb(self, work: Work, running: _Heard | None, reading: _Heard | None) -> None:
        if running is not None:
            for place, request in enumerate(work.running):
                self._note(request, running[0], place)
                self._hear(request, *running, place, first=False)
        if reading is not None:
            for place, (request, count) in enumerate(work.reading):
                request.read += count
                self._note(request, reading[0], place)
                if request.read >= request.goal:
                    self._hear(request, *reading, place, first=not request.known)

    def _hear(
        self, request: Request, columns: Columns, report: Report, place: int, *, first: bool
    ) -> None:
        """A request learns what a step said of its row."""
        count = int(columns.count[place])
        tokens = columns.tokens[place, :count].tolist()
        request.ids.extend(tokens)
        request.emitted = int(columns.emitted[place])
        request.pending = int(columns.pending[place])
        if request.noted is not None:  # its drafts are those it had, not those in the report
            request.pending, request.noted = request.noted[1], None
        else:
            if first or request.phase is Phase.RUNNING:  # otherwise it proposed what it had before
                request.failed_before = request.failures
            request.failures = int(columns.failures[place])
        request.heard = int(columns.heard[place])
        request.read = len(request.ids) - request.known
        if first:
            self._prompts += count
        if request.logprobs is not None and report.logprobs is not None:
            request.logprobs += _listed(report, place, count, request.rules.logprobs or 0)
        if count and request in self.scheduler.suspects:
            self.scheduler.suspects.remove(request)
            self._acquit(request)
        status = Status(int(columns.status[place]))
        over, began = status is not Status.RUNNING, request.phase is Phase.READING
        accepted = -1 if first else int(columns.accepted[place])
        try:
            stopped = status is Status.STOP_STRING
            text = self._text(request, tokens, done=over, stopped=stopped)
        except Exception as error:  # of the tokenizer: nobody else's business
            self._end(request, "failed", error, tokens=tokens, accepted=accepted)
            return
        if over:
            error = None
            if status is Status.NONFINITE:
                error = FloatingPointError("the target's logits are not finite")
            self._end(request, status.reason, error, tokens=tokens, text=text, accepted=accepted)
            return
        request.phase = Phase.RUNNING
        if began:
            self.scheduler.remember(request)
        if tokens:
            self._ready.append(EngineEvent(request, tokens, text, accepted, None))

    def _note(self, request: Request, columns: Columns, place: int) -> None:
        """Its counters."""
        forwards = np.asarray(
            [columns.target_forwards[place], columns.drafter_forwards[place]], np.int64
        )
        step = (forwards - self._forwards_at) % 2**32
        if step.any():  # the first to hear of this program
            self._forwards = self._forwards + step
            self._forwards_at, self._step = forwards, step
        old, missing = request.now, self.draft_tokens - columns.evaluated_at.shape[1]
        by_place = np.stack([columns.evaluated_at[place], columns.accepted_at[place]])
        if missing:  # a drafter that was switched off has no places
            by_place = np.pad(by_place, ((0, 0), (0, missing)))
        by_place = by_place.astype(np.int64)
        request.now = Counts(
            target_forwards=old.target_forwards + int(self._step[0]),
            drafter_forwards=old.drafter_forwards + int(self._step[1]),
            rounds=int(columns.rounds[place]),
            emitted=int(columns.said[place]),
            proposed=int(columns.proposed[place]),
            evaluated_at=by_place[0],
            accepted_at=by_place[1],
            undrafted=columns.undrafted[place].astype(np.int64),
        )

    def _text(
        self, request: Request, tokens: list[int], *, done: bool, stopped: bool = False
    ) -> str | None:
        if self.model.text is None:
            return None
        if request.output_text is None:
            prompt, stop = request.prompt, request.rules.stop
            request.output_text = OutputText(self.model.text, prompt=prompt, stop=stop)
            request.text = ""
        text = request.output_text.push(tokens, done=done, stopped=stopped)
        request.text = (request.text or "") + text
        return text

    def _cut_short(self, request: Request, reason: str, error: BaseException | None = None) -> None:
        """End a request between steps, with the text that was held back."""
        text = None
        try:
            if request.output_text is not None:
                text = self._text(request, [], done=True)
        finally:
            self._end(request, reason, error, text=text)

    def _end(
        self,
        request: Request,
        reason: str,
        error: BaseException | None = None,
        *,
        tokens: list[int] | None = None,
        text: str | None = None,
        accepted: int = -1,
    ) -> None:
        """A request is over: its row is free, its cache is kept, remembered or free."""
        keeps = request.keep and error is None and request.row is not None
        memory = self.runner.save(request) if keeps and self.scheduler.checkpointed else None
        request.settle()
        request.finish_reason, request.error = reason, error
        # On the device a row that ends by itself has stopped; any other must be told to.
        stop = reason in ("cancelled", "failed")
        request.phase, request.output_text = Phase.DONE, None
        if keeps:
            self.scheduler.keep(request, memory, stop=stop)
        elif request.row is not None:
            self.scheduler.leave(request, stop=stop, remember=error is None)
        self._ready.append(EngineEvent(request, tokens or [], text, accepted, reason, error))

    # ------------------------------------------------------------------ when something goes wrong

    def _recover(self) -> None:
        """After a step that failed half way: nothing on the device is trusted any more.

        Every request that had a row waits for one again, with the tokens that were told.
        """
        scheduler = self.scheduler
        for request in list(scheduler.active.values()):
            request.settle()
            request.noted = None
            scheduler.leave(request, stop=False, remember=False)
            scheduler.add(request)
        for request in list(scheduler.kept.values()):
            scheduler.forget(request)
        scheduler.cache.clear()
        scheduler.stopping.clear()
        scheduler.lost.clear()
        self._forwards_at = np.zeros(2, np.int64)
        self.runner.reset()

    def _blame(self, work: Work, error: BaseException) -> None:
        """Who took part in a failed step runs alone from now on, until it gets past it.

        One that fails alone, twice, gets the drafter switched off; if it fails without one too, it
        is to blame, and otherwise the drafter is.
        """
        self.faults += 1
        self.last_fault = error
        part = [*work.running, *(request for request, _ in work.reading)]
        if len(part) == 1:
            request = part[0]
            request.strikes += 1
            if request.strikes == _STRIKES and self.draft_tokens:
                self._draft(NoDrafter())
            elif request.strikes >= _STRIKES:
                self._acquit(None)
                self._cut_short(request, "failed", error)
        known = set(self.scheduler.suspects)
        self.scheduler.suspects += [r for r in part if r not in known and not r.finished]

    def _acquit(self, request: Request | None) -> None:
        """A suspect got past where it failed, or was found guilty: the drafter stays or returns."""
        if request is not None and request.strikes >= _STRIKES and self.draft_tokens:
            self.drafter_fault = self.last_fault
        elif request is None and self.drafter_fault is None:
            self._draft(self.drafter)
        if request is not None:
            request.strikes = 0

    def _draft(self, drafter: Drafter) -> None:
        """Go on with another drafter. Nobody has a row."""
        if self.runner.drafter is not drafter:
            seen = self.runner.compiled
            self.runner = Runner(self.model.target, drafter, **self._sizes)
            self.runner.compiled |= seen

    # ------------------------------------------------------------------ small things

    def _usable(self) -> None:
        if self._closed:
            raise ValueError("the engine is closed")

    def _queue(self, request: Request) -> None:
        if not self.scheduler.busy:
            self.runner.table.start()
        request.order = next(self._order)
        self.scheduler.add(request)

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        ids = encode(self.model, prompt) if isinstance(prompt, str) else prompt
        return check_ids(self.model, [np.asarray(ids)])[0][0].tolist()

    def _rules(self, length: int, options: dict[str, Any]) -> RequestRules:
        """The rules of a request, checked before it is queued."""
        rules = check_rules(self.model, self.draft_tokens, self.context, length, options)
        pages = self.scheduler.pages
        needed = pages.needed(length + rules.max_new_tokens - 1)
        if pages.count and needed > pages.count:
            raise ValueError(
                f"{length} prompt tokens and {rules.max_new_tokens} new ones need {needed} pages "
                f"of {pages.size}; the pool has {pages.count}"
            )
        return rules

    def _pool_size(
        self,
        rows: int,
        columns: int,
        page_size: int,
        memory: int | str | None,
        pages: int | None,
        checkpoints: int,
    ) -> int:
        if memory is None:
            return rows * columns if pages is None else whole("pages", pages)
        if pages is not None:
            raise ValueError(f"memory is {memory!r} and pages is {pages}; expected one of them")
        sizes = dict(context=self.context, pages=columns, page_size=page_size, columns=columns)
        each = checkpoint_bytes(self.model.target, self.drafter, **sizes)
        left = parse_memory(memory) - checkpoints * each
        if left <= 0:
            raise ValueError(
                f"memory is {memory!r}; {checkpoints} checkpoints of {each} bytes need more"
            )
        found = plan(
            replace(self.model, drafter=self.drafter),
            memory=left,
            max_batch=rows,
            context=self.context,
            page_size=page_size,
        )
        return min(found.pages, rows * columns)


_Heard = tuple[Columns, Report]


class _DeviceError(Exception):
    """A step failed while its programs ran; its cause says why."""


def _listed(
    report: Report, place: int, count: int, alternatives: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """Log-probabilities of a row's tokens as plain numbers."""
    found = report.logprobs
    assert found is not None
    return [
        (
            float(found.token[place, t]),
            [
                (int(found.top_tokens[place, t, n]), float(found.top[place, t, n]))
                for n in range(alternatives)
            ],
        )
        for t in range(count)
    ]


__all__ = ["Engine"]
