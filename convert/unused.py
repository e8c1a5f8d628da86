"""Entries of files without effect here: harmless for a stated reason, or reported.

A user may rely on a setting that is ignored in silence. Therefore every key, tensor and file is
used, or is listed in a table here with the reason why it changes nothing, or becomes a remark.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from convert.errors import ArtifactError

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
"""Files that :class:`jaxdraft.text.Text` reads."""

Table = Mapping[str, str]
"""Name -> reason why it changes nothing."""


@dataclasses.dataclass
class Remarks:
    """Remarks, which do not prevent loading.

    Attributes:
      notes: facts worth knowing. Reports list them.
      warnings: settings of a file that are not applied. Reports list them, and loading warns.
    """

    notes: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    def note(self, file: str, text: str) -> None:
        """Add a note about a file."""
        self.notes.append(f"{file}: {text}")

    def warn(self, file: str, text: str) -> None:
        """Add a warning about a file."""
        self.warnings.append(f"{file}: {text}")

    @property
    def all(self) -> tuple[str, ...]:
        """Warnings, then notes."""
        return (*self.warnings, *self.notes)


class Tracked(Mapping[str, Any]):
    """A JSON object that records the keys that were read."""

    def __init__(self, body: Mapping[str, Any]):
        self._body = body
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._body[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._body)

    def __len__(self) -> int:
        return len(self._body)


def shown(value: Any) -> str:
    """Return a JSON value as text of at most 80 characters."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_integer(value: Any) -> TypeGuard[int]:
    """Return whether a JSON value is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def stop_ids(value: Any, where: str, file: str, vocab: int, remarks: Remarks) -> tuple[int, ...]:
    """Return the tokens that end a sequence.

    Args:
      value: a token, a list of them, or None.
      where: its path in the file.
      file: name of the file.
      vocab: V. Other integers are never emitted, so they are left out and noted.
      remarks: destination.

    Raises:
      ArtifactError: something in it is not an integer.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_integer(i) for i in ids):
        expected = f"a token id in 0..{vocab - 1}, or a list of them"
        raise ArtifactError(file, where, shown(value), expected)
    kept = tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab))
    if len(kept) < len(set(ids)):
        text = f"{where} is {shown(value)}: tokens are 0..{vocab - 1}, and others are never emitted"
        (remarks.note if kept else remarks.warn)(file, text)
    return kept


def report_unread(
    body: Tracked, where: str, file: str, harmless: Collection[str], remarks: Remarks
) -> None:
    """Remark on every key that was not read and is not harmless.

    Args:
      body: an object of a file.
      where: its path in the file, empty for the root.
      file: name of the file.
      harmless: keys that change nothing.
      remarks: destination. A key whose value is null has no setting, so it becomes a note.
    """
    for key, value in body._body.items():
        if key in body.read or key in harmless:
            continue
        path = f"{where}.{key}" if where else key
        text = f"{path} is {shown(value)}: an unknown setting, which has no effect"
        (remarks.note if value is None else remarks.warn)(file, text)


def _table(*groups: tuple[str, str]) -> dict[str, str]:
    """Return the reason for each name, from groups of names that share a reason."""
    return {name: reason for reason, names in groups for name in names.split()}


_TRAINING = "has an effect in training alone"
_ACTIVATIONS = (
    "activations, keys and values stay floats: rounding them serves kernels that are not included, "
    "and the weights are the same without"
)
_LABEL = "a name or a version, for people and other programs"
_CALL = "a choice of each call of transformers, not of the model"
_CLASSIFIER = "for classification heads, which are not loaded"
_TEMPLATE = "text is encoded by tokenizer.json and the chat template, which hold these tokens"
FOR_PICTURES = "for images, which are not read: text alone is decoded"

CONFIG_KEYS = _table(
    (
        _TRAINING,
        "attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout hidden_dropout_prob"
        " attention_probs_dropout_prob initializer_range router_aux_loss_coef"
        " output_router_logits router_jitter_noise gradient_checkpointing embed_requires_grad",
    ),
    (
        _LABEL,
        "_name_or_path architectures auto_map model_type transformers_version finetuning_task"
        " tokenizer_class task_specific_params unsloth_version unsloth_fixed"
        " transformers.js_config",
    ),
    (
        _CALL,
        "use_cache return_dict output_attentions output_hidden_states torchscript use_bfloat16"
        " output_scores return_dict_in_generate tf_legacy_loss use_return_dict"
        " cache_implementation attn_implementation _attn_implementation"
        " _attn_implementation_autoset",
    ),
    (_CLASSIFIER, "id2label label2id num_labels problem_type classifier_dropout"),
    (
        _TEMPLATE,
        "bos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id cls_token_id",
    ),
    (
        FOR_PICTURES,
        "vision_config vision_start_token_id vision_end_token_id image_token_id video_token_id"
        " image_token_index video_token_index vision_feature_layer audio_config"
        " language_model_only boi_token_index eoi_token_index mm_tokens_per_image",
    ),
    (
        "1 in every published file, and no program reads it",
        "full_attn_mod interpolate_factor",
    ),
    (
        "splits products into smaller ones of the same sums",
        "pretraining_tp chunk_size_feed_forward",
    ),
    ("cross attention and encoders, which these families do not have", "tie_encoder_decoder"),
)
"""Keys of ``config.json`` that change no number."""

DRAFTER_KEYS = {
    **CONFIG_KEYS,
    **_table(
        ("the target's, which decides", "eos_token_id tie_word_embeddings num_target_layers"),
        ("the drafter's tables are as long as the target's context", "max_position_embeddings"),
    ),
}
"""Keys of a block drafter's ``config.json`` that change no draft."""

SPECULATORS_KEYS = _table(
    (_LABEL, "verifier"),
    ("each call sets the number of its drafts", "default_proposal_method"),
    ("the size of the block gives the number of drafts", "proposal_methods"),
)
"""Keys of ``speculators_config`` that change no draft."""

QUANTIZATION_KEYS = _table(
    (_LABEL, "quantization_status version quant_method_version"),
    (
        "how scales and zero points were found; they are stored",
        "observer observer_kwargs damp_percent damp_auto_increment static_groups sym"
        " true_sequential mse act_group_aware desc_act",
    ),
    (
        "the tensors show which matrices are quantized",
        "targets ignore ignored_layers modules_to_not_convert lm_head",
    ),
    (_ACTIVATIONS, "input_activations output_activations kv_cache_scheme activation_scheme"),
    (
        "which kernels of other programs run",
        "backend do_fuse fuse_max_seq_len modules_to_fuse exllama_config use_exllama"
        " max_input_length use_cuda_fp16 module_name_preceding_first_block offload_to_disk",
    ),
    (
        "where and by what the file was made",
        "model_file_base_name model_name_or_path dataset tokenizer quantizer meta"
        " block_name_to_quantize dequantize run_compressed",
    ),
    ("a measure of the file", "global_compression_ratio"),
)
"""Keys of ``quantization_config`` that change no number."""

_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1, 0),
    "top_k": (0, -1, 50),  # 50: the default of transformers
    "top_p": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}
"""Settings of sampling, and the values that change nothing."""

_RULES: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "diversity_penalty": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_time": (),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "stop_strings": ([], ""),
    "exponential_decay_length_penalty": (),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "watermarking_config": (),
    "token_healing": (False,),
    "dola_layers": (),
    "constraints": ([],),
    "do_sample": (False,),
}
"""Settings of decoding, and the values that change nothing."""

DECODING_KEYS = _SAMPLING.keys() | _RULES.keys()
"""Keys with settings of decoding."""

GENERATION_KEYS = {
    **CONFIG_KEYS,
    **_table(
        (_LABEL, "_from_model_config _commit_hash chat_format"),
        ("each call sets its own limit", "max_length max_new_tokens max_window_size"),
        ("beams and contrastive search, which other keys switch on", "early_stopping low_memory"),
        (
            "assisted generation of transformers; drafters are loaded and chosen here",
            "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold"
            " prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit"
            " assistant_lookbehind target_lookbehind is_assistant",
        ),
        ("how a runtime keeps its cache", "past_present_share_buffer cache_config chunk_size"),
        ("how a runtime compiles", "compile_config disable_compile prefill_chunk_size"),
        ("the seed is the key of each call", "random_seed"),
        (_CALL, "output_logits trust_remote_code"),
    ),
}
"""Keys of ``generation_config.json``, and of ``search`` in ``genai_config.json``, that change
nothing."""


def report_generation(
    body: Mapping[str, Any], file: str, remarks: Remarks, *, where: str = "", known: Sequence[str]
) -> None:
    """Remark on the settings of decoding that a file recommends.

    They are not applied: each call of ``generate`` has settings of its own, and decodes greedily by
    default. Recommended sampling is a note, because most published models recommend some. Rules
    that change greedy decoding too, such as penalties, are warnings.

    Args:
      body: the settings.
      file: name of the file.
      remarks: destination.
      where: path of the settings in the file.
      known: keys that have been acted on.
    """
    prefix = f"{where}." if where else ""
    sampled = body.get("do_sample") is True
    wanted = {
        key: value
        for key, value in body.items()
        if key in _SAMPLING and value is not None and value not in _SAMPLING[key]
    }
    listed = ", ".join(f"{key} {shown(value)}" for key, value in wanted.items())
    if sampled:
        remarks.note(
            file,
            f"{prefix}do_sample is true{f' ({listed})' if listed else ''}: decoding is greedy "
            "unless a call passes sampling=jaxdraft.Sampling(...)",
        )
    elif listed:
        remarks.note(file, f"{prefix}do_sample is not true, so these have no effect: {listed}")
    for key, value in body.items():
        if (
            key in known
            or key in _SAMPLING
            or key in GENERATION_KEYS
            or key == "do_sample"
            and sampled
        ):
            continue
        if key not in _RULES:
            text = "an unknown setting, which has no effect"
        elif value is None or value in _RULES[key]:
            continue
        else:
            text = "not applied; each call passes its own settings"
        text = f"{prefix}{key} is {shown(value)}: {text}"
        (remarks.note if value is None else remarks.warn)(file, text)


TOKENIZER_KEYS = _table(
    (_LABEL, "tokenizer_class name_or_path _name_or_path auto_map processor_class backend"),
    (
        "tokenizer.json holds the same settings",
        "added_tokens_decoder additional_special_tokens add_prefix_space do_lower_case"
        " tokenizer_file vocab_file merges_file sp_model_kwargs legacy use_default_system_prompt"
        " spaces_between_special_tokens errors from_slow split_special_tokens trim_offsets"
        " strip_accents unk_id use_fast is_local local_files_only",
    ),
    (
        "rows are neither padded nor cut",
        "padding_side truncation_side model_max_length max_length pad_to_multiple_of stride"
        " truncation_strategy pad_token_type_id truncation padding model_input_names",
    ),
    (
        FOR_PICTURES,
        "image_token video_token vision_bos_token vision_eos_token audio_token"
        " audio_bos_token audio_eos_token",
    ),
)
"""Keys of ``tokenizer_config.json`` that change no token."""

TOKENIZER_READ = (
    "chat_template bos_token eos_token unk_token sep_token pad_token cls_token mask_token"
    " extra_special_tokens model_specific_special_tokens"
).split()
"""Keys of ``tokenizer_config.json`` that :class:`jaxdraft.text.Text` reads."""

_BUFFERS = (
    (r"\.rotary_emb\.inv_freq$", "rotary tables are made from config.json"),
    (r"\.rotary_emb\.(cos|sin)_cached$", "rotary tables are made from config.json"),
    (r"(^|\.)(attn|attention|self_attn)\.masked_bias$", "a constant of masks"),
    (r"(^|\.)position_ids$", "a count from zero"),
    (r"\.(input|output|activation|k|v|q)_(scale|zero_point|global_scale)$", _ACTIVATIONS),
)
_MASK = re.compile(r"(^|\.)(attn|attention|self_attn)\.bias$")


def unused_tensor(name: str, shape: tuple[int, ...]) -> str | None:
    """Return why an unused tensor changes nothing, or None if it may change something.

    Args:
      name: its name in the checkpoint.
      shape: its shape. A causal mask has four axes, a bias has one.
    """
    for pattern, reason in _BUFFERS:
        if re.search(pattern, name):
            return reason
    return "a causal mask" if _MASK.search(name) and len(shape) == 4 else None


_FILES = (
    (
        r"(?i)^(readme|license|licence|notice|copying|model_card|use_policy|changelog)(\..*)?$",
        _LABEL,
    ),
    (r"(?i)\.(md|rst|txt|pdf|png|jpe?g|gif|svg|webp|csv|html?|lock)$", _LABEL),
    (r"^\.", "hidden"),
    (
        r"^(vocab\.json|merges\.txt|added_tokens\.json|special_tokens_map\.json"
        r"|tokenizer\.model|tokenizer\.json\..*|vocab\.txt|tokenizer_config\.json\..*)$",
        "tokenizer.json holds the same",
    ),
    (r"(^|_)(pre)?processor_config\.json$", FOR_PICTURES),
    (
        r"^((pytorch_model|tf_model|flax_model|rust_model|consolidated).*"
        r"|model.*\.(h5|msgpack|ot)|.*\.gguf)$",
        "the same weights in another form",
    ),
    (
        r"^(training_args\.bin|trainer_state\.json|optimizer\.pt|scheduler\.pt|rng_state.*\.pth"
        r"|.*_results\.json|params\.json)$",
        _TRAINING,
    ),
)


def report_files(
    names: Collection[str], used: Collection[str], file: str, remarks: Remarks
) -> None:
    """Remark on the files of a folder that are not read and not known to be harmless.

    Args:
      names: names of all files in the folder.
      used: names of the files that are read.
      file: name of the folder.
      remarks: destination. An adapter would change every number, so it becomes a warning.
    """
    for name in sorted(set(names) - set(used)):
        if any(re.search(pattern, name) for pattern, _ in _FILES):
            continue
        if name.startswith("adapter_"):
            remarks.warn(file, f"{name} is not read: the adapter is not applied")
        else:
            remarks.note(file, f"{name} is not read")


def report_tokenizer(body: Mapping[str, Any], file: str, remarks: Remarks) -> None:
    """Remark on the settings of ``tokenizer_config.json`` without effect here.

    Args:
      body: its content.
      file: its name.
      remarks: destination.
    """
    for key, value in body.items():
        if key in TOKENIZER_READ or key in TOKENIZER_KEYS:
            continue
        if key in ("add_bos_token", "add_eos_token"):
            text = "tokenizer.json decides which tokens surround a text"
        elif key == "clean_up_tokenization_spaces":
            if not value:
                continue
            text = "text is decoded by tokenizer.json, spaces before punctuation included"
        else:
            text = "an unknown setting, which has no effect"
        remarks.note(file, f"{key} is {shown(value)}: {text}")
