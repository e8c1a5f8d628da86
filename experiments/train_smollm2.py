"""Make a DFlash2 drafter for SmolLM2-135M-Instruct, on two processor cores.

    python experiments/train_smollm2.py talk dflash2 soft save --target FOLDER --out FOLDER

``--target`` is the checkpoint as ``prepare_smollm2.py`` or the hub gives it (config.json,
safetensors, tokenizer). No other data is read: the target generates the questions too. Given the
chat template up to the user's turn, it continues with a question (Xu et al., "Magpie",
arXiv:2406.08464), and then answers it greedily; it also continues pieces of Python's own manual.
The drafter is trained on the answers. Stages can be stopped and started again. ``smollm2.py``
measures the result.

Drafts come from the 8,192 most frequent tokens of the answers: the whole head would take a quarter
of a plain step. The channels of the target's residual differ widely in size, so the auxiliary
states are scaled to unit variance, and the scales are folded into ``fc``. The trained matrices are
stored in eight bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pydoc_data.topics
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from tqdm import tqdm

import jaxdraft
from jaxdraft import Model, checkpoint
from jaxdraft.config import AttentionConfig, BlockDrafterConfig, ConvConfig
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.nn.dflash2 import DFlash2
from jaxdraft.nn.linear import Frozen
from jaxdraft.ranking import best_token
from jaxdraft.target import DecoderTarget
from jaxdraft.train import initialize
from jaxdraft.train.data import DraftBatches, FeatureCache
from jaxdraft.train.loop import fit
from jaxdraft.train.losses import DraftLoss
from jaxdraft.train.optimize import labels, make_step, optimizer, start, trapezoid

TAPS = (14, 27)
DRAFTS = 7
SPOKEN = "@"  # placeholder of the user's words in a rendered conversation
MASK = 16  # a reserved token that occurs in no text
END = 2  # <|im_end|>
STEPS, GROUP = 256, 48  # tokens per sequence, sequences per batch
SHORTEST, PROMPT = 40, 96  # tokens per prompt
QUESTION, MANUAL = 48, 64  # most tokens of a generated question; of a piece of the manual
EVERY = 6  # one group in so many continues the manual
WINDOW = 128
DRAFTABLE = 8192


# --------------------------------------------------------------------------- data


def load_target(folder: Path) -> Model:
    """Return the target in float32, with its taps."""
    model = jaxdraft.load(folder, dtype="float32", drafter="none")
    target = model.target
    assert isinstance(target, DecoderTarget)
    config = dataclasses.replace(target.config, taps=TAPS)
    decoder = target.decoder()
    decoder.config = config
    return dataclasses.replace(
        model, target=DecoderTarget(Frozen.of(decoder), config, target.dtype)
    )


@functools.partial(jax.jit, static_argnames="new_tokens")
def continue_with_states(
    target: DecoderTarget,
    prompts: jax.Array,
    lengths: jax.Array,
    heat: jax.Array,
    key: jax.Array,
    *,
    new_tokens: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Continue prompts of different lengths, and return the target's states too.

    Args:
      target: target to run.
      prompts: padded prompts [B, P] int32.
      lengths: tokens per prompt [B] int32.
      heat: temperature [] float32; zero is greedy.
      key: random key.
      new_tokens: number of new tokens, N.

    Returns:
      Tokens [B, N]; auxiliary states and hidden rows [B, P + N, X] of prompt rows (padded to P) and
      of the new tokens.
    """
    batch, size = prompts.shape
    one = jnp.ones((batch,), jnp.int32)

    def choose(logits: jax.Array, key: jax.Array) -> jax.Array:
        def draw() -> jax.Array:  # a quarter of a step's time
            return jax.random.categorical(key, logits / heat).astype(jnp.int32)

        return lax.cond(heat > 0, draw, lambda: best_token(logits))

    state = target.init(batch, size + new_tokens)
    out = target.forward(prompts, lengths, state, row=lengths - 1)
    first, rest = jax.random.split(key)
    token = choose(out.logits[:, 0], first)
    state = target.commit(out.state, lengths)

    def step(carry: Any, key: jax.Array) -> tuple[Any, Any]:
        state, token = carry
        one_row = target.forward(token[:, None], one, state)
        assert one_row.aux is not None and one_row.hidden is not None
        kept = token, one_row.aux[:, 0], one_row.hidden[:, 0]
        return (target.commit(one_row.state, one), choose(one_row.logits[:, 0], key)), kept

    _, (tokens, aux, hidden) = lax.scan(step, (state, token), jax.random.split(rest, new_tokens))
    assert out.aux is not None and out.hidden is not None
    aux, hidden = (
        jnp.concatenate([before, jnp.swapaxes(after, 0, 1)], axis=1)
        for before, after in ((out.aux, aux), (out.hidden, hidden))
    )
    return tokens.T, aux, hidden


def questions(model: Model, key: jax.Array) -> list[list[int]]:
    """Return whole prompts with questions generated by the target, cut if they are long."""
    assert model.text is not None
    before, after = (
        model.text.encode(part, add_special_tokens=False)
        for part in model.text.render([{"role": "user", "content": SPOKEN}]).split(SPOKEN)
    )
    prompts = np.tile(np.asarray(before, np.int32), (GROUP, 1))
    tokens, _, _ = continue_with_states(
        model.target,
        jnp.asarray(prompts),
        jnp.full((GROUP,), len(before), jnp.int32),
        jnp.asarray(1.0, jnp.float32),
        key,
        new_tokens=QUESTION,
    )
    found = []
    for row in np.asarray(tokens).tolist():
        question = row[: row.index(END)] if END in row else row
        found.append([*before, *question, *after])  # `after` begins with <|im_end|>
    return found


def manual(model: Model, rng: np.random.Generator) -> list[list[int]]:
    """Return ``GROUP`` pieces of Python's manual."""
    assert model.text is not None
    topics = list(pydoc_data.topics.topics.values())
    found = []
    while len(found) < GROUP:
        ids = model.text.encode(topics[rng.integers(len(topics))])
        if len(ids) > MANUAL:
            first = int(rng.integers(len(ids) - MANUAL))
            found.append(ids[first : first + MANUAL])
    return found


def talk(model: Model, out: Path, groups: int) -> None:
    """Generate text with the target, group by group, into ``talk/NNN.npz``."""
    folder = out / "talk"
    folder.mkdir(parents=True, exist_ok=True)
    scale = None
    for number in tqdm(range(groups), desc="talk"):
        file = folder / f"{number:03d}.npz"
        if file.exists():
            continue
        if scale is None and (out / "scale.npy").exists():
            scale = np.load(out / "scale.npy")
        key = jax.random.key(number)
        if number % EVERY == EVERY - 1:
            prompts = manual(model, np.random.default_rng(number))
        else:
            prompts = questions(model, key)
        lengths = np.asarray([len(p) for p in prompts], np.int32)
        size = PROMPT
        padded = np.zeros((GROUP, size), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        made = continue_with_states(
            model.target,
            jnp.asarray(padded),
            jnp.asarray(lengths),
            jnp.zeros((), jnp.float32),
            jax.random.fold_in(key, 1),  # greedy: nothing is drawn
            new_tokens=STEPS - SHORTEST,
        )
        new, aux, hidden = map(np.asarray, made)
        whole = {  # without the padding, and without empty questions
            row: np.r_[0:n, size : size + STEPS - SHORTEST][:STEPS]
            for row, n in enumerate(lengths)
            if n >= SHORTEST
        }
        if scale is None:  # of the answers; the first rows of a text are of another size
            answers = [aux[row, places][lengths[row] :] for row, places in whole.items()]
            scale = np.concatenate(answers).std(axis=0)
            np.save(out / "scale.npy", scale)
        kept: dict[str, list[np.ndarray]] = {"tokens": [], "aux": [], "hidden": [], "prompt": []}
        for row, places in whole.items():
            kept["tokens"].append(np.r_[padded[row], new[row]][places])
            kept["aux"].append((aux[row, places] / scale).astype(np.float16))
            kept["hidden"].append(hidden[row, places].astype(np.float16))
            kept["prompt"].append(lengths[row])
        aside = file.with_suffix(".tmp.npz")
        arrays: dict[str, Any] = {name: np.stack(rows) for name, rows in kept.items()}
        np.savez(aside, **arrays)
        aside.replace(file)


# --------------------------------------------------------------------------- training


def open_talk(out: Path) -> FeatureCache:
    """Return all generated sequences."""
    files = sorted((out / "talk").glob("???.npz"))
    if not files:
        raise ValueError(f"no groups in {out / 'talk'}: run the stage 'talk' first")
    arrays: dict[str, np.ndarray] = {}
    for name in ("tokens", "prompt", "aux", "hidden"):
        parts = []
        for file in files:
            with np.load(file) as stored:
                parts.append(stored[name])
        arrays[name] = np.concatenate(parts)
    greedy = np.ones(len(arrays["tokens"]), bool)
    return FeatureCache(arrays["tokens"], greedy, arrays["prompt"], arrays["aux"], arrays["hidden"])


def most_used(cache: FeatureCache, vocab_size: int) -> np.ndarray:
    """Return the ``DRAFTABLE`` most frequent tokens of the answers, ascending."""
    answers = np.arange(cache.tokens.shape[1])[None] >= cache.prompt[:, None]
    count = np.bincount(cache.tokens[answers], minlength=vocab_size)
    chosen = np.sort(np.argsort(-count, kind="stable")[:DRAFTABLE])
    print(f"{count[chosen].sum() / count.sum():.2%} of all tokens can be drafted")
    return chosen.astype(np.int32)


def block_config(target: DecoderTarget) -> BlockDrafterConfig:
    """Return the configuration: two narrow layers over the last 128 positions."""
    return BlockDrafterConfig(
        kind="dflash2",
        vocab_size=target.vocab_size,
        width=target.config.width,
        aux_width=target.config.aux_width,
        layers=2,
        attention=AttentionConfig(
            heads=4,
            kv_heads=1,
            head_dim=64,
            rotary_dim=64,
            qk_norm=True,
            norm_eps=target.config.norm_eps,
            scale=64**-0.5,
            window=WINDOW,
        ),
        mlp_hidden=224,
        norm_eps=target.config.norm_eps,
        block_size=DRAFTS + 1,
        draft_tokens=DRAFTS,
        candidates=8,
        rank=8,
        mask_token=MASK,
        context_length=target.config.context_length,
        conv=ConvConfig(taps=2, group=64),
        draft_vocab_size=DRAFTABLE,
    )


def fresh(target: DecoderTarget, vocabulary: np.ndarray) -> Frozen[DFlash2]:
    """Return the untrained drafter, with the target's head and, to be trained, its final norm."""
    module = DFlash2(block_config(target), dtype=jnp.float32, rngs=nnx.Rngs(4))
    module.vocabulary.set_value(jnp.asarray(vocabulary))
    module.norm.weight.set_value(jnp.array(target.decoder.params["norm"]["weight"]))
    return initialize.drafter(Frozen.of(module))


def embedding_and_head(target: DecoderTarget) -> tuple[jax.Array, jax.Array]:
    """Return the target's embedding and head, [V, D] each."""
    params = target.decoder.params
    embedding = params["embed"]["weight"]
    return embedding, embedding if target.config.tied else params["head"]["weight"]


def train(model: Model, out: Path, stage: str, steps: int) -> None:
    """Train on the generated sequences, into ``STAGE.npz``.

    The stage "soft" continues "dflash2", at half the rate, against the target's probabilities.
    """
    soft = stage == "soft"
    target = model.target
    assert isinstance(target, DecoderTarget)
    cache = open_talk(out)
    print(f"{len(cache.tokens)} sequences of {STEPS} tokens")
    frozen = fresh(target, most_used(cache, target.vocab_size))
    if soft:
        frozen = Frozen(stored_params(frozen, out / "dflash2.npz"), frozen.structure)
    transform = optimizer(
        labels(frozen),
        matrix_rate=0.02,
        vector_rate=4e-3,
        weight_decay=0.1 if soft else 0.0,
    )
    embedding, head = embedding_and_head(target)
    loss = DraftLoss(embedding=embedding, head=head, decay=4.0, soft=0.8)
    held = np.flatnonzero(np.arange(len(cache.tokens)) % 64 == 63)
    learned = np.setdiff1d(np.arange(len(cache.tokens)), held)

    def part(rows: np.ndarray, seed: int, *, hard: bool) -> DraftBatches:
        some = FeatureCache(*(a[rows] for a in vars(cache).values()))
        if not hard:  # soft labels are for sequences that are not called greedy
            some = dataclasses.replace(some, greedy=np.zeros_like(some.greedy))
        greedy = 8 if hard else 0
        return DraftBatches(some, batch=8, greedy=greedy, anchors=32, drafts=DRAFTS, seed=seed)

    state = fit(
        make_step(frozen, loss, transform),
        start(frozen, transform),
        part(learned, 6 if soft else 5, hard=not soft),
        steps=steps,
        schedule=lambda step: (0.5 if soft else 1.0) * trapezoid(step, steps=steps, decay=0.5),
        folder=out / stage,
        save_every=100,
        name=stage,
    )
    judge = jax.jit(lambda params, batch: loss(Frozen(params, frozen.structure)(), batch)[1])
    seen = [judge(state.params, part(held, 7, hard=True)(n)) for n in range(8)]
    survival = np.mean([m["greedy_survival"] for m in seen], axis=0)
    print(
        "held-out sequences: share of accepted drafts",
        survival,
        "tokens per round",
        1 + survival.sum(),
    )
    np.savez(out / f"{stage}.npz", **flat(state.params))


def flat(params: Any) -> dict[str, Any]:
    """Return the parameters by path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): np.asarray(value) for path, value in leaves}


def stored_params(frozen: Frozen, file: Path) -> Any:
    """Read the parameters that :func:`flat` flattened."""
    with np.load(file) as stored:
        return jax.tree.map_with_path(
            lambda path, _: jnp.asarray(stored[jax.tree_util.keystr(path)]), frozen.params
        )


def load_drafter(model: Model, out: Path) -> BlockDrafter:
    """Return the trained drafter for unscaled aux: ``fc(aux / scale) = (fc / scale)(aux)``."""
    target = model.target
    assert isinstance(target, DecoderTarget)
    full = fresh(target, np.arange(DRAFTABLE))
    params = stored_params(full, out / "soft.npz")
    params["fc"]["weight"] = params["fc"]["weight"] / jnp.asarray(np.load(out / "scale.npy"))
    backbone = Frozen(params, full.structure)
    return BlockDrafter.of(
        backbone, *embedding_and_head(target), block_config(target), target.dtype
    )


def save(model: Model, out: Path) -> None:
    """Write the drafter's checkpoint, ``dflash2``, without the target's beside it."""
    whole = dataclasses.replace(model, drafter=load_drafter(model, out))
    with tempfile.TemporaryDirectory(dir=out) as aside:
        saved = checkpoint.save(
            whole, Path(aside) / "both", dtype=jnp.bfloat16, compute_dtype=jnp.float32, int8=True
        )
        made = out / "checkpoint"
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(saved.folder / "dflash2", made)
    print(made, {k: v for k, v in saved.rounded.items() if "dflash2" in k})


STAGES = ("talk", "dflash2", "soft", "save")
STEPS_OF = {"dflash2": 2400, "soft": 1000}


def main() -> None:
    """Run the stages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--target", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=100, help="of sequences to write")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = load_target(args.target)
    for stage in args.stages:
        if stage == "talk":
            talk(model, args.out, args.groups)
        elif stage in STEPS_OF:
            train(model, args.out, stage, STEPS_OF[stage])
        else:
            save(model, args.out)


if __name__ == "__main__":
    main()
