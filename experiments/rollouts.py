"""Does reinforcement learning work with drafts, and how fast are its rollouts?

The policy is the shipped model, the task to write a function body that Python can parse, and the
update that of group-relative rewards (Shao et al., "DeepSeekMath", arXiv:2402.03300, 4.1):
a sample's reward counts relative to those of the other samples of its prompt. All rollouts are
drawn with drafts, in one engine that takes new weights after every step. A copy of the drafter
learns from the rollouts as they come, and the shipped one goes stale.

Writes ``rollouts.md``. ``--steps N`` takes another number of steps.
"""

from __future__ import annotations

import argparse
import ast
import functools
import math
import re
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import interleave, ratios, table, write_result

import jaxdraft
from jaxdraft import Engine, Model, Sampling, train
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.nn.linear import Frozen

PROMPT, NEW = 16, 32
PROMPTS, SAMPLES, ROWS = 12, 8, 4
RATE = 1e-4
WARM = Sampling(temperature=0.8)
FILES = ("argparse", "ast", "copy", "inspect", "locale", "os", "shutil", "subprocess", "tokenize")


def headers(model: Model) -> np.ndarray:
    """Return prompts [N, PROMPT]: the ends of texts that stop after the header of a function."""
    assert model.text is not None
    library, found = Path(sysconfig.get_paths()["stdlib"]), []
    for name in FILES:
        if (path := library / f"{name}.py").is_file():
            text = path.read_text("utf-8")
            for match in re.finditer(r"^(def \w+\([^)\n]*\):\n)", text, re.MULTILINE):
                ids = model.text.encode(text[max(0, match.start() - 200) : match.end()])
                found.append(ids[-PROMPT:])
    return np.asarray([ids for ids in found if len(ids) == PROMPT], np.int32)


def reward(model: Model, prompt: list[int], output: list[int]) -> float:
    """Return 1 if Python can parse the last header and the whole lines after it, one at least."""
    assert model.text is not None
    text = model.text.decode([*prompt, *output])
    start = text[: len(model.text.decode(prompt))].rfind("def ")
    lines = text[start:].split("\n")[:-1]  # the last line is not finished
    if not any(line.strip() for line in lines[1:]):
        return 0.0
    try:
        ast.parse("\n".join(lines))
    except (SyntaxError, ValueError):
        return 0.0
    return 1.0


def with_weights(model: Model, params: Any) -> Model:
    """Return the model with other weights of its target."""
    target: Any = model.target
    return replace(model, target=replace(target, decoder=Frozen(params, target.decoder.structure)))


def policy_step(transform: optax.GradientTransformation, model: Model) -> Any:
    """Return a compiled update of the target's weights."""

    def loss(params: Any, tokens: jax.Array, advantages: jax.Array) -> jax.Array:
        found = jaxdraft.log_probs(with_weights(model, params), tokens)[:, PROMPT - 1 :]
        return -jnp.mean(found * advantages[:, None])

    @functools.partial(jax.jit, donate_argnums=(1,))
    def step(params: Any, state: Any, tokens: jax.Array, advantages: jax.Array) -> Any:
        gradient = jax.grad(loss, allow_int=True)(params, tokens, advantages)
        gradient = jax.tree.map(
            lambda p, g: g if g.dtype == p.dtype else jnp.zeros_like(p), params, gradient
        )
        updates, state = transform.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return step


def _features(model: Model, tokens: jax.Array) -> tuple[Any, Any]:
    """Return the auxiliary and hidden states of the target; its logits are not computed."""
    found = jaxdraft.score(model, tokens)
    return found.aux_hidden, found.hidden


class Follower:
    """A drafter that learns from rollouts."""

    def __init__(self, model: Model) -> None:
        assert isinstance(model.drafter, BlockDrafter)
        self.drafter = model.drafter
        self.rng = np.random.default_rng(2)
        frozen = self.drafter.backbone
        assert isinstance(frozen, Frozen)
        transform = train.optimizer(train.labels(frozen), matrix_rate=2e-3, vector_rate=3e-4)
        loss = train.DraftLoss(embedding=self.drafter.embedding, head=self.drafter.head)
        self.step = train.make_step(frozen, loss, transform)
        self.state = train.start(frozen, transform)
        self.features = jax.jit(_features)

    def learn(self, model: Model, tokens: np.ndarray) -> None:
        """Take a step on rollouts [B, PROMPT + NEW] of the model."""
        drafts, batch = self.drafter.draft_tokens, 32
        rows = self.rng.permutation(len(tokens))[:batch]
        seen = self.features(model, tokens[rows])
        anchors = self.rng.integers(PROMPT - 1, PROMPT + NEW - drafts - 1, (batch, 8))
        given = train.Continuations(
            tokens=jnp.asarray(tokens[rows]), aux=seen[0], hidden=seen[1],
            anchors=jnp.asarray(anchors, jnp.int32), greedy=jnp.zeros(batch, bool),
        )  # fmt: skip
        self.state, _ = self.step(self.state, given, jnp.float32(1.0))

    def current(self) -> BlockDrafter:
        """Return a drafter with the weights of now."""
        params = jax.tree.map(jnp.copy, self.state.params)  # a step donates its state
        return replace(self.drafter, backbone=Frozen(params, self.drafter.backbone.structure))


def rollouts(engine: Engine, prompts: np.ndarray, key: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens [B, PROMPT + NEW] and rewards [B] of all samples of all prompts."""
    found = engine.map(
        prompts.tolist(), n=SAMPLES, key=key, sampling=WARM, stop_ids=(), max_new_tokens=NEW
    )
    tokens = np.asarray([[*r.prompt, *r.tokens] for r in found], np.int32)
    rewards = np.asarray([reward(engine.model, r.prompt, r.tokens) for r in found])
    for request in found:
        request.close()
    return tokens, rewards


class Bench:
    """Two engines, with drafts and without, that draw the same rollouts in turns."""

    def __init__(self, model: Model, prompts: np.ndarray) -> None:
        sizes: dict[str, Any] = dict(max_batch=ROWS, context=64, page_size=16)
        self.engine = Engine(model, **sizes)
        self.plain = Engine(model, drafter="none", **sizes)
        self.prompts = prompts

    def table(self, model: Model, drafters: dict[str, Any], key: int) -> str:
        """Return tokens per round and speeds of the drafters and of none, as a table."""
        self.plain.update(model, "none")
        runs = {"none": lambda: rollouts(self.plain, self.prompts, key)}
        rates = {"none": _tokens_per_round(self.plain, runs["none"])}
        for name, drafter in drafters.items():
            runs[name] = functools.partial(self._with, model, drafter, key)
            rates[name] = _tokens_per_round(self.engine, runs[name])
        times = interleave(runs, repeats=3)
        rows = []
        for name, seconds in times.items():
            low, middle, high = ratios(times["none"], seconds)
            speed = PROMPTS * SAMPLES * NEW / sorted(seconds)[len(seconds) // 2]
            ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
            rows.append([name, f"{rates[name]:.2f}", f"{speed:.0f}", ratio])
        return table(["drafter", "tokens per round", "tokens/s", "speed over none"], rows)

    def _with(self, model: Model, drafter: Any, key: int) -> tuple[np.ndarray, np.ndarray]:
        self.engine.update(model, drafter)
        return rollouts(self.engine, self.prompts, key)

    def difference(self) -> str:
        """Compare mean rewards of samples that are drawn with drafts and without."""
        means = {}
        for name, engine in (("with drafts", self.engine), ("without", self.plain)):
            found = [rollouts(engine, self.prompts, 30_000 + key)[1] for key in range(4)]
            rewards = np.concatenate(found)
            means[name] = rewards.mean(), rewards.std() / math.sqrt(rewards.size), rewards.size
        (a, wide, _), (b, broad, _) = means.values()
        parts = [f"{m:.3f} +- {e:.3f} {name} ({n} samples)" for name, (m, e, n) in means.items()]
        errors = abs(a - b) / math.hypot(wide, broad)
        return f"{', '.join(parts)}; the difference is {errors:.1f} standard errors."


def _tokens_per_round(engine: Engine, run: Callable[[], Any]) -> float:
    before = engine.summary()
    run()
    after = engine.summary()
    emitted = after.emitted - before.emitted - (after.prompts - before.prompts)
    return emitted / (after.rounds - before.rounds)


def learn(
    model: Model, bench: Bench, follower: Follower, pool: np.ndarray, steps: int
) -> tuple[Model, list[float]]:
    """Train the policy and the drafter that follows it; return it with the rewards of all steps."""
    decoder: Any = model.target.decoder  # type: ignore[missing-attribute]
    params, rng = decoder.params, np.random.default_rng(1)
    floats = jax.tree.map(lambda x: bool(jnp.issubdtype(x.dtype, jnp.floating)), params)
    transform = optax.masked(optax.adam(RATE), floats)
    state, step, curve = transform.init(params), policy_step(transform, model), []
    for number in range(steps):
        prompts = pool[rng.integers(0, len(pool), PROMPTS)]
        tokens, rewards = rollouts(bench.engine, prompts, number)
        groups = rewards.reshape(PROMPTS, SAMPLES)
        spread = groups.std(1, keepdims=True) + 0.01
        advantages = (groups - groups.mean(1, keepdims=True)) / spread
        given = jax.device_put((tokens, advantages.reshape(-1).astype(np.float32)))
        params, state = step(params, state, *given)
        model = with_weights(model, params)
        follower.learn(model, tokens)
        bench.engine.update(model, follower.current())
        curve.append(float(rewards.mean()))
        print(f"step {number}: reward {curve[-1]:.2f}", flush=True)
    return model, curve


def main() -> None:
    """Train, then compare rollouts with the drafter that followed, the stale one and none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    model = jaxdraft.load(jaxdraft.EMBEDDED)
    shipped, pool = model.drafter, headers(model)
    follower = Follower(model)
    bench = Bench(model, pool[np.random.default_rng(0).permutation(len(pool))[:PROMPTS]])
    before = bench.table(model, {"shipped": shipped}, 10_000)
    model, curve = learn(model, bench, follower, pool, steps)
    programs = bench.engine.programs
    after = bench.table(model, {"stale": shipped, "followed": follower.current()}, 20_000)
    part = max(1, steps // 8)
    points = [
        [f"{i + 1} to {min(i + part, steps)}", f"{np.mean(curve[i : i + part]):.2f}"]
        for i in range(0, steps, part)
    ]
    body = f"""{PROMPTS} prompts of {PROMPT} tokens, {SAMPLES} samples each, {NEW} tokens,
temperature {WARM.temperature}, {ROWS} rows at once, up to {shipped.draft_tokens} drafts. The
reward is 1 if Python can parse the header and the whole lines after it, of which one is not empty.

## Mean reward in training

{table(["steps", "mean reward"], points)}

The engine with drafts used {programs} programs in all; it was updated after every step.

## Rollouts before training

{before}

## Rollouts after training

{after}

## The same distribution

Mean reward of the trained policy: {bench.difference()}"""
    write_result(__file__, "Rollouts of a policy that learns", body)


if __name__ == "__main__":
    main()
