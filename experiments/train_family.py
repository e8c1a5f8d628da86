"""Make a small hybrid target and its three drafters from text, on two processor cores.

    python experiments/train_family.py text target --out FOLDER
    python experiments/train_family.py continue dflash2 dspark dspark-more mtp --out FOLDER
    python experiments/train_family.py save evaluate speed --out FOLDER

Stages run in the order given; each leaves its result in the folder and can be stopped and started
again. The text is the Python standard library's own source (PSF licence), ten files of which are
held out whole; the tokens are a byte-level BPE of that text; drafters learn from the frozen
target's own continuations, greedy and sampled. Losses see every matrix rounded to four bits, the
rest ends as bfloat16 values, and ``save`` writes checkpoints that other runtimes and exporters
read, without loss. The result of ``evaluate`` is ``train_family.md``, that of ``speed``
``train_family_speed.md``.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from common import interleave, ratios, table, write_result
from flax import nnx
from tqdm import tqdm

from jaxdraft import Model, Output, Sampling, checkpoint, generate, summarize
from jaxdraft.config import (
    FULL_ATTENTION,
    AttentionConfig,
    BlockDrafterConfig,
    ConvConfig,
    DeltaNetConfig,
    MlpConfig,
    MtpConfig,
    TargetConfig,
)
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.draft.mtp import MtpDrafter
from jaxdraft.nn.decoder import Decoder
from jaxdraft.nn.dflash2 import DFlash2
from jaxdraft.nn.dspark import DSpark
from jaxdraft.nn.linear import Frozen
from jaxdraft.nn.mtp import Mtp
from jaxdraft.target import DecoderTarget
from jaxdraft.train import initialize
from jaxdraft.train.data import DraftBatches, FeatureCache, TokenWindows, continue_prompts
from jaxdraft.train.loop import fit
from jaxdraft.train.losses import DraftLoss, language_loss
from jaxdraft.train.optimize import Labels, labels, make_step, optimizer, start, trapezoid
from jaxdraft.train.rounding import round_as_stored, round_to_int4

HELD_OUT = (
    "asyncio/locks.py",
    "bisect.py",
    "configparser.py",
    "csv.py",
    "difflib.py",
    "glob.py",
    "json/encoder.py",
    "queue.py",
    "sched.py",
    "textwrap.py",
)
LEFT_OUT = {"encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "turtledemo"}
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<|mask|>",
)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MASK = SPECIALS.index("<|mask|>")
VOCABULARY = 384  # eight ids at the end stay free: the architecture reserves image tokens there
MERGED = 376
SPLIT = (  # how Qwen's tokenizers split text
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
THETA = 10000.0
CONTEXT = 1024
LENGTH, BATCH = 512, 4  # of the target's training windows
SEQUENCES, SEQUENCE, GROUP = 1920, 320, 64  # continuations, their length, and how many run at once
PROMPTS = (64, 144, 224)  # tokens of text before them
TEMPERATURE = 0.8
DRAFTS, MTP_LINKS = 7, 3
CUTS, NEW_TOKENS, REPEATS = 4, 64, 4  # prompts a held-out file, tokens of each, keys
TIMED_TOKENS, TURNS = 128, 5  # what is timed of every prompt, and how often
STAGES = (
    "text",
    "target",
    "continue",
    "dflash2",
    "dspark",
    "dspark-more",
    "mtp",
    "save",
    "evaluate",
    "speed",
)
STEPS = {"target": 500, "mtp": 250, "dspark": 800, "dspark-more": 1200, "dflash2": 1600}


# --------------------------------------------------------------------------- text


def sources(library: Path) -> tuple[list[Path], list[Path]]:
    """Return the files to train on, and the held-out ones."""
    train = []
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if any(part in LEFT_OUT or part.startswith("test") for part in parts[:-1]):
            continue
        if path.relative_to(library).as_posix() not in HELD_OUT:
            train.append(path)
    return train, [library / name for name in HELD_OUT]


def make_text(out: Path, library: Path) -> None:
    """Train the tokenizer, and write all tokens: ``<|endoftext|>`` and the content of each file."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    train, held_out = sources(library)
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in train]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MERGED,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder = out / "tokenizer"
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "backend": "tokenizers",
        "eos_token": "<|im_end|>",
        "extra_special_tokens": ["<|im_start|>", "<|mask|>"],
        "model_max_length": CONTEXT,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT)
    encoded = [[0, *tokenizer.encode(text).ids] for text in texts]
    tokens = np.concatenate([np.asarray(ids, np.uint16) for ids in encoded])
    np.save(out / "tokens.npy", tokens)
    held = {
        path.relative_to(library).as_posix(): tokenizer.encode(path.read_text("utf-8")).ids
        for path in held_out
    }
    (out / "held_out.json").write_text(json.dumps(held))
    characters = sum(map(len, texts))
    print(f"{len(train)} files, {characters} characters, {tokens.size} tokens")


# --------------------------------------------------------------------------- target


def target_config() -> TargetConfig:
    """Return the target's configuration: gated delta nets, full attention every fourth layer."""
    return TargetConfig(
        vocab_size=VOCABULARY,
        width=512,
        layers=("delta_net", "delta_net", "delta_net", "attention"),
        attention=AttentionConfig(
            heads=8,
            kv_heads=2,
            head_dim=64,
            rotary_dim=32,
            gated=True,
            qk_norm=True,
            scale=64**-0.5,
        ),
        delta_net=DeltaNetConfig(
            key_heads=4, value_heads=8, key_dim=64, value_dim=64, conv_width=4
        ),
        mlp=MlpConfig(hidden=1280),
        norm_eps=1e-6,
        tied=False,
        context_length=CONTEXT,
        taps=(1, 2, 3),
    )


def in_four_bits(kinds: Labels) -> Callable[[Any], Any]:
    """Round matrices to four bits, as they are stored; the losses use it from the first step."""
    return functools.partial(round_to_int4, kinds=kinds)


def train_target(out: Path, steps: int) -> None:
    """Train the target as a language model."""
    frozen = initialize.decoder(
        Frozen.of(Decoder(target_config(), dtype=jnp.float32, rngs=nnx.Rngs(0))), jax.random.key(0)
    )
    kinds = labels(frozen)
    transform = optimizer(kinds, matrix_rate=0.02, vector_rate=4e-3, weight_decay=0.02)
    state = fit(
        make_step(frozen, language_loss, transform, rounding=in_four_bits(kinds)),
        start(frozen, transform),
        TokenWindows(np.load(out / "tokens.npy"), LENGTH + 1, BATCH, seed=1),
        steps=steps,
        schedule=lambda step: trapezoid(step, steps=steps, decay=1 / 3),
        folder=out / "target",
        log_every=10,
        save_every=50,
        name="target",
    )
    learned = Frozen(state.params, frozen.structure)
    trained = round_as_stored(learned, kinds, shifted_norms=True)
    save_arrays(out / "target.npz", trained)
    print(f"held out: {held_out_nats(out, trained):.3f} nats per token")


def held_out_nats(out: Path, target: Frozen) -> float:
    """Return the mean nats per token of the held-out files, in windows of the training length."""
    files = json.loads((out / "held_out.json").read_text())
    loss = jax.jit(lambda frozen, tokens: language_loss(frozen(), tokens)[0])
    nats = []
    for ids in files.values():
        ids = np.asarray([0, *ids], np.int32)
        rows = len(ids) // (LENGTH + 1)
        for row in ids[: rows * (LENGTH + 1)].reshape(rows, 1, LENGTH + 1):
            nats.append(float(loss(target, row)))
    return float(np.mean(nats))


def save_arrays(path: Path, frozen: Frozen) -> None:
    """Write all arrays of a module, named by their paths."""
    flat = jax.tree_util.tree_leaves_with_path(frozen.params)
    names = ["/".join(str(part.key) for part in keys) for keys, _ in flat]
    arrays: dict[str, Any] = {n: np.asarray(a) for n, (_, a) in zip(names, flat, strict=True)}
    np.savez(path, **arrays)


def load_arrays(path: Path, form: nnx.Module) -> Frozen:
    """Read the arrays of :func:`save_arrays` into a module like ``form``."""
    frozen = Frozen.of(form)
    with np.load(path) as arrays:
        params = jax.tree.map_with_path(
            lambda keys, _: jnp.asarray(arrays["/".join(str(part.key) for part in keys)]),
            frozen.params,
        )
    return Frozen(params, frozen.structure)


def load_target(out: Path) -> DecoderTarget:
    """Return the trained target."""
    config = target_config()
    frozen = load_arrays(out / "target.npz", Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    return DecoderTarget(frozen, config, jnp.dtype(jnp.float32))


# --------------------------------------------------------------------------- drafters' data


def make_continuations(out: Path) -> None:
    """Continue cuts of the text with the target, half of them greedily, and keep its features."""
    target = load_target(out)
    tokens = np.load(out / "tokens.npy").astype(np.int32)
    rng = np.random.default_rng(2)
    key = jax.random.key(3)
    rows, greedy, prompt = [], [], []
    for number in tqdm(range(SEQUENCES // GROUP), desc="continuations"):
        size = PROMPTS[number % len(PROMPTS)]
        first = rng.integers(0, tokens.size - size, GROUP)
        cuts = tokens[first[:, None] + np.arange(size)[None]]
        drawn = np.arange(GROUP) % 2 == 0
        key, here = jax.random.split(key)
        heat = jnp.asarray(np.where(drawn, TEMPERATURE, 0.0), jnp.float32)
        new = SEQUENCE - size
        rows.append(
            np.asarray(continue_prompts(target, jnp.asarray(cuts), heat, here, new_tokens=new))
        )
        greedy.append(~drawn)
        prompt.append(np.full(GROUP, size))
    FeatureCache.write(
        out / "features",
        target.decoder,
        np.concatenate(rows),
        np.concatenate(greedy),
        np.concatenate(prompt),
    )


# --------------------------------------------------------------------------- drafters


def block_config(kind: Literal["dflash2", "dspark"]) -> BlockDrafterConfig:
    """Return two small layers over the target's states: a window for DFlash2, all for DSpark."""
    target = target_config()
    dflash2 = kind == "dflash2"
    return BlockDrafterConfig(
        kind=kind,
        vocab_size=target.vocab_size,
        width=target.width,
        aux_width=target.aux_width,
        layers=2,
        attention=AttentionConfig(
            heads=4,
            kv_heads=1,
            head_dim=32,
            rotary_dim=32,
            qk_norm=True,
            scale=32**-0.5,
            window=64 if dflash2 else FULL_ATTENTION,
        ),
        mlp_hidden=256,
        norm_eps=1e-6,
        block_size=DRAFTS + 1 if dflash2 else DRAFTS,
        draft_tokens=DRAFTS,
        candidates=16,
        rank=32,
        mask_token=MASK,
        context_length=CONTEXT,
        conv=ConvConfig(taps=2, group=16) if dflash2 else None,
    )


def new_drafter(kind: str) -> nnx.Module:
    """Return an untrained drafter."""
    if kind == "mtp":
        return Mtp(MtpConfig.of(target_config()), dtype=jnp.float32, rngs=nnx.Rngs(4))
    form = DFlash2 if kind == "dflash2" else DSpark
    config = block_config("dflash2" if kind == "dflash2" else "dspark")
    return form(config, dtype=jnp.float32, rngs=nnx.Rngs(4))


def warm(out: Path, kind: str, fresh: Frozen, target: DecoderTarget) -> Frozen:
    """Initialize a drafter from trained weights.

    DSpark's backbone starts as DFlash2's without convolutions. The MTP head starts as the target's
    last layer, over the sum of the two rows it reads.
    """
    params = dict(fresh.params)
    if kind == "dspark":
        found = load_arrays(out / "dflash2.npz", new_drafter("dflash2")).params
        have = dict(jax.tree_util.tree_leaves_with_path(found))
        params = jax.tree.map_with_path(lambda path, x: have.get(path, x), params)
    elif kind == "mtp":
        last = target.decoder.params["layers"][len(target.config.layers) - 1]
        both = 0.5 * jnp.tile(jnp.eye(target.config.width), (1, 2))
        params.update(last, fc={"weight": both}, norm=target.decoder.params["norm"])
    assert jax.tree.structure(params) == jax.tree.structure(fresh.params)
    return Frozen(params, fresh.structure)


def train_drafter(out: Path, kind: str, steps: int, *, more: bool = False) -> None:
    """Distil the target's continuations into a drafter.

    With ``more``, training continues at half the rate, mostly on sampled sequences: a Markov head
    has less information about a row than DFlash2's selector, and needs more steps for them.
    """
    target = load_target(out)
    if more:
        frozen = load_arrays(out / f"{kind}.npz", new_drafter(kind))
    else:
        frozen = warm(out, kind, initialize.drafter(Frozen.of(new_drafter(kind))), target)
    kinds = labels(frozen)
    transform = optimizer(kinds, matrix_rate=0.02, vector_rate=4e-3)
    mtp = kind == "mtp"
    loss = DraftLoss(
        embedding=target.decoder.params["embed"]["weight"],
        head=target.decoder.params["head"]["weight"],
        decay=2.0 if mtp or more else 4.0,
        head_weight=1.0 if kind != "dspark" else 0.3,
        variation_weight=2.0 if more else 1.0,
        temperature=TEMPERATURE,
        soft=0.8,
        links=MTP_LINKS,
    )
    batches = DraftBatches(
        FeatureCache.open(out / "features"),
        batch=6 if mtp else 8,
        greedy=3 if mtp else 2 if more else 4,
        anchors=80 if mtp else 32,
        drafts=MTP_LINKS if mtp else DRAFTS,
        seed=7 if more else 5,
        aux=not mtp,
    )
    state = fit(
        make_step(frozen, loss, transform, rounding=in_four_bits(kinds)),
        start(frozen, transform),
        batches,
        steps=steps,
        schedule=lambda step: (0.5 if more else 1.0) * trapezoid(step, steps=steps, decay=0.5),
        folder=out / f"{kind}{'-more' if more else ''}",
        save_every=100,
        name=kind,
    )
    learned = Frozen(state.params, frozen.structure)
    trained = round_as_stored(learned, kinds, shifted_norms=mtp)
    save_arrays(out / f"{kind}.npz", trained)


def load_drafter(out: Path, kind: str, target: DecoderTarget) -> BlockDrafter | MtpDrafter:
    """Return a trained drafter of ``target``."""
    frozen = load_arrays(out / f"{kind}.npz", new_drafter(kind))
    embedding, head = (target.decoder.params[name]["weight"] for name in ("embed", "head"))
    if kind == "mtp":
        return MtpDrafter(frozen, embedding, head, MtpConfig.of(target_config()), target.dtype)
    config = block_config("dflash2" if kind == "dflash2" else "dspark")
    return BlockDrafter(frozen, embedding, head, config, target.dtype)


def save_family(out: Path) -> None:
    """Write the family as checkpoints: ``checkpoint/target``, ``dflash2`` and ``dspark``."""
    target = load_target(out)
    mtp, *blocks = (load_drafter(out, kind, target) for kind in ("mtp", "dflash2", "dspark"))
    model = Model.of(target, mtp, stop_ids=(SPECIALS.index("<|im_end|>"),))
    saved = checkpoint.save(
        model,
        out / "checkpoint",
        drafters=blocks,
        dtype=jnp.bfloat16,
        compute_dtype=jnp.float32,  # as it was trained; the files are much smaller
        int4=True,
        tokenizer=out / "tokenizer",
        overwrite=True,
    )
    assert not saved.rounded, f"not stored as trained: {saved.rounded}"
    size = sum(file.stat().st_size for file in saved.folder.rglob("*") if file.is_file())
    print(f"{saved.folder}: {size / 1e6:.1f} MB")


# --------------------------------------------------------------------------- evaluation


def cuts(out: Path) -> dict[str, list[list[int]]]:
    """Return ``CUTS`` prompts per held-out file, at random positions, of 64 to 128 tokens."""
    rng = np.random.default_rng(6)
    found = {}
    for name, ids in json.loads((out / "held_out.json").read_text()).items():
        sizes = rng.integers(64, 129, CUTS)
        firsts = [int(rng.integers(0, len(ids) - size)) for size in sizes]
        found[name] = [ids[at : at + size] for at, size in zip(firsts, sizes, strict=True)]
    return found


def tokens_per_round(out: Output) -> np.ndarray:
    """Return the number of rounds and of tokens they emitted, per row: [B, 2].

    A round counts if it starts before ``NEW_TOKENS`` tokens are emitted. The limit is some tokens
    higher, so that each of these rounds could draft a full block.
    """
    assert out.trace is not None
    accepted = np.asarray(out.trace.accepted)  # [B, rounds], -1 past a row's end
    ran = accepted >= 0
    emitted = np.where(ran, accepted + 1, 0)
    before = 1 + np.cumsum(emitted, axis=1) - emitted
    counted = ran & (before < NEW_TOKENS)
    return np.stack([counted.sum(axis=1), np.where(counted, emitted, 0).sum(axis=1)], axis=1)


def evaluate(out: Path) -> None:
    """Measure tokens per round on the held-out files, greedy and sampled, file by file."""
    target = load_target(out)
    prompts = cuts(out)
    flat = [prompt for of in prompts.values() for prompt in of]
    drawn = Sampling(temperature=TEMPERATURE)
    columns: dict[str, np.ndarray] = {}
    plain = None
    for kind in ("dflash2", "dspark", "mtp"):
        if not (out / f"{kind}.npz").exists():
            continue
        drafter = load_drafter(out, kind, target)
        if isinstance(drafter, MtpDrafter):
            drafter = drafter.with_draft_tokens(MTP_LINKS)
        model = Model.of(target, drafter)
        options = dict(max_new_tokens=NEW_TOKENS + DRAFTS + 1, stop_ids=(), trace=True)
        greedy = generate(model, flat, **options)
        if plain is None:
            plain = generate(model, flat, drafter="none", **options).ids()
        assert greedy.ids() == plain, f"{kind} changed the greedy tokens"
        columns[f"{kind}, greedy"] = tokens_per_round(greedy)
        runs = [
            generate(model, flat, sampling=drawn, key=seed, **options) for seed in range(REPEATS)
        ]
        columns[f"{kind}, T = {TEMPERATURE}"] = np.sum([*map(tokens_per_round, runs)], axis=0)
    of = np.repeat(np.arange(len(prompts)), CUTS)
    rows: list[list[object]] = []
    for number, name in enumerate(prompts):
        sums = [c[of == number].sum(axis=0) for c in columns.values()]
        rows.append([name, *(f"{tokens / rounds:.2f}" for rounds, tokens in sums)])
    sums = [c.sum(axis=0) for c in columns.values()]
    rows.append(["all", *(f"**{tokens / rounds:.2f}**" for rounds, tokens in sums)])
    rows.append(["rounds", *(int(rounds) for rounds, _ in sums)])
    body = (
        table(["held-out file", *columns], rows)
        + f"\n\nTokens per round, the target's own included; {DRAFTS} drafts per round, MTP "
        f"{MTP_LINKS}. {CUTS} prompts per file of 64 to 128 tokens, {NEW_TOKENS} new tokens; "
        f"sampled with {REPEATS} keys. Greedy tokens with each drafter equal those "
        "without. Held-out text: "
        f"{held_out_nats(out, target.decoder):.3f} nats per token, "
        f"{characters_per_token(out):.2f} characters per token."
    )
    write_result(__file__, "Tokens per round of a family trained on text", body)


def speed(out: Path) -> None:
    """Time whole calls with and without DFlash2, one request at a time, on the held-out files."""
    target = load_target(out)
    model = Model.of(target, load_drafter(out, "dflash2", target))
    prompts = cuts(out)
    outs: dict[tuple[str, str], list[Output]] = {}

    def run(name: str, drafter: str) -> None:
        options = dict(max_new_tokens=TIMED_TOKENS, stop_ids=(), drafter=drafter)
        outs[name, drafter] = [generate(model, [prompt], **options) for prompt in prompts[name]]
        jax.block_until_ready([each.tokens for each in outs[name, drafter]])

    both = [(name, drafter) for name in prompts for drafter in ("none", "auto")]
    turns = {f"{name} {drafter}": functools.partial(run, name, drafter) for name, drafter in both}
    seconds = interleave(turns, repeats=TURNS)
    rows: list[list[object]] = []
    gains = []
    for name in prompts:
        plain, drafted = (outs[name, drafter] for drafter in ("none", "auto"))
        assert [o.ids() for o in plain] == [o.ids() for o in drafted], f"{name}: other tokens"
        rate = summarize([each.stats for each in drafted]).tokens_per_round
        least, gain, largest = ratios(seconds[f"{name} none"], seconds[f"{name} auto"])
        gains.append(gain)
        speeds = [
            CUTS * TIMED_TOKENS / statistics.median(seconds[f"{name} {drafter}"])
            for drafter in ("none", "auto")
        ]
        spread = f"{gain:.2f} ({least:.2f}..{largest:.2f})"
        rows.append([name, *(f"{each:.0f}" for each in speeds), spread, f"{rate:.2f}"])
    mean = statistics.geometric_mean(gains)
    rows.append(["geometric mean", "", "", f"**{mean:.2f}**", ""])
    head = ["held-out file", "tokens/s without", "with DFlash2", "speed-up", "tokens per round"]
    body = table(head, rows) + (
        f"\n\nWhole calls of `generate` with the prompt, {CUTS} prompts per file of 64 to 128 "
        f"tokens, {TIMED_TOKENS} new tokens, greedily, one request at a time, {DRAFTS} drafts per "
        f"round. Medians of {TURNS} turns, all files with and without in turn; speed-ups turn by "
        "turn (least..largest). Same tokens with and without."
    )
    write_result(__file__, "Speed of a family trained on text", body, "train_family_speed")


def characters_per_token(out: Path) -> float:
    """Return the characters per token of the held-out text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json"))
    files = json.loads((out / "held_out.json").read_text()).values()
    return sum(len(tokenizer.decode(ids)) for ids in files) / sum(map(len, files))


def main() -> None:
    """Run the stages named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--steps", type=int, help="of a training stage, instead of its own number")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for stage in args.stages:
        if stage == "text":
            make_text(args.out, args.library)
        elif stage == "target":
            train_target(args.out, args.steps or STEPS["target"])
        elif stage == "continue":
            make_continuations(args.out)
        elif stage == "save":
            save_family(args.out)
        elif stage == "evaluate":
            evaluate(args.out)
        elif stage == "speed":
            speed(args.out)
        else:
            kind, _, more = stage.partition("-")
            train_drafter(args.out, kind, args.steps or STEPS[stage], more=bool(more))


if __name__ == "__main__":
    main()
