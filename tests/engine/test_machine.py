"""Any history of an engine: arrivals, rules, turns, cancellations, a pool that is too small."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxdraft import Engine, Request, Sampling
from tests.engine.helpers import alone, greedy, history_model
from tests.engine.test_engine import SIZES, history_engine
from tests.examples import examples

PAGES, ROWS = SIZES["pages"], SIZES["max_batch"]
NEW = st.sampled_from([1, 4, 9, 16])
TEXT = st.lists(st.sampled_from([1, 2, 7]), min_size=1, max_size=14)  # prefixes meet again


@functools.cache
def engine_of(recurrent: bool) -> Engine:
    """One engine for all examples: whatever happened before must leave no trace."""
    return history_engine(recurrent=recurrent)


@functools.cache
def expected(recurrent: bool, prompt: tuple[int, ...], new: int, **rules: Any) -> list[int]:
    """What a request says by itself."""
    model = history_model(recurrent=recurrent)
    stops, heat, seed = rules["stop_ids"], rules["heat"], rules["seed"]
    if not heat:
        return greedy(model, list(prompt), new, stops)
    how = Sampling(temperature=heat, top_k=5)
    limit = rules["draft_limit"]
    out = alone(
        model, [list(prompt)], new, stop_ids=stops, draft_limit=limit, sampling=how, key=seed
    )
    return out.ids()[0]


class EngineMachine(RuleBasedStateMachine):
    """Submits, steps, cancels, continues and closes; at the end everything is what it is alone."""

    @initialize(recurrent=st.booleans())
    def start(self, recurrent: bool) -> None:
        self.recurrent, self.engine = recurrent, engine_of(recurrent)
        self.engine.scheduler.cache.clear()  # it would make examples depend on their order
        self.requests: list[Request] = []
        self.expected: dict[int, tuple[Any, ...]] = {}
        self.heard: dict[int, list[int]] = {}

    def _submit(self, prompt: list[int], new: int, rules: dict[str, Any], keep: bool) -> None:
        options = self._options(new, rules)
        if len(prompt) + new - 1 > 4 * PAGES:
            with pytest.raises(ValueError, match=f"the pool has {PAGES}"):
                self.engine.submit(prompt, keep=keep, **options)
            return
        request = self.engine.submit(prompt, keep=keep, **options)
        self.requests.append(request)
        self.heard[request.number] = []
        self.expected[request.number] = (tuple(prompt), new, rules)

    def _options(self, new: int, rules: dict[str, Any]) -> dict[str, Any]:
        heat = rules["heat"]
        if self.recurrent:  # one kind of target is enough to compile the programs that draw for
            rules["heat"] = heat = 0.0
        sampling = Sampling(temperature=heat, top_k=5) if heat else None
        return dict(
            max_new_tokens=new, stop_ids=rules["stop_ids"], draft_limit=rules["draft_limit"],
            sampling=sampling, key=rules["seed"],
        )  # fmt: skip

    rules_ = st.fixed_dictionaries(
        dict(
            stop_ids=st.sampled_from([(), (3,), (0, 5)]),
            draft_limit=st.integers(0, 3),
            heat=st.sampled_from([0.0, 0.0, 0.9]),
            seed=st.integers(0, 2),
        )
    )

    @rule(prompt=TEXT, new=NEW, rules=rules_, keep=st.booleans())
    def submit(self, prompt: list[int], new: int, rules: dict[str, Any], keep: bool) -> None:
        self._submit(prompt, new, rules, keep)

    @rule(size=st.integers(48, 60), rules=rules_)
    def submit_long(self, size: int, rules: dict[str, Any]) -> None:
        """Most of them are more than the pool holds."""
        self._submit([1, 2] * (size // 2), 3, rules, False)

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for event in self.engine.step():
                self.heard[event.request.number] += event.tokens
                assert event.error is None
            self.engine.check()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        request.cancel()
        request.cancel()

    @precondition(lambda self: any(r.finish_reason for r in self.requests))
    @rule(data=st.data(), more=TEXT, new=NEW, back=st.booleans())
    def another_turn(self, data: st.DataObject, more: list[int], new: int, back: bool) -> None:
        done = [r for r in self.requests if r.finished]
        request = data.draw(st.sampled_from(done))
        self._compare(request)
        sequence = request._sequence
        before = sequence.ids[: sequence.turns[-1].start] if back else sequence.ids
        prompt = (*before, *more)
        if len(prompt) + new - 1 > 4 * PAGES:
            return
        if back:
            request.rewind()
        rules = self.expected[request.number][2]
        request.extend(more, max_new_tokens=new)
        self.expected[request.number] = (prompt, new, rules)
        self.heard[request.number] = []

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        request.close()
        request.close()
        self.requests.remove(request)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def _compare(self, request: Request) -> None:
        prompt, new, rules = self.expected[request.number]
        if request.finish_reason is None or not request._sequence.turns[-1].output:
            return  # rewound to nothing
        whole = expected(self.recurrent, prompt, new, **rules)
        assert request.prompt == list(prompt)
        if request.finish_reason == "cancelled":
            assert request.tokens == whole[: len(request.tokens)]
        else:
            assert request.tokens == whole, request

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            while self.engine.busy:
                self.step(1)
            for request in self.requests:
                self._compare(request)
                assert self.heard[request.number] == request.tokens
        finally:
            scheduler = self.engine.scheduler
            for request in self.requests:
                request.close()
            for _ in self.engine.run():
                pass
        self.engine.check()
        assert not scheduler.active and not scheduler.kept and not scheduler.waiting
        assert scheduler.pages.free + scheduler.cache.size == PAGES
        assert len(scheduler._free) == ROWS and self.engine.faults == 0
        # A round that moves rows and one that does not, a chunk; greedy and sampled.
        assert self.engine.programs <= 6


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = hypothesis.settings(
    max_examples=examples(12),
    stateful_step_count=25,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)  # a step takes too long to shrink much
