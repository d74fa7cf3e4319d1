"""The processor: tokenizer, chat template and image settings in one folder.

The training split's messages flow in (mode `fit`) or a folder or hub id (mode `load`); a folder
that transformers' AutoProcessor loads flows out, with `processor.json` beside its files. How a
conversation becomes tokens is `data/encode.py`'s business. Equal inputs give equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow.compute as pc
from pydantic import Field, ValidationError

from diptych.core.errors import ConfigError, DataError, FormatError
from diptych.core.files import replacing_folder, write_text
from diptych.core.hashing import sha256_folder
from diptych.core.records import (
    FORMAT_VERSION,
    ImageSettings,
    Message,
    ProcessorInfo,
    Section,
    TokenIds,
)
from diptych.core.tables import read_parts
from diptych.data.chat import to_chat

if TYPE_CHECKING:
    from transformers import Qwen3VLProcessor

INFO_NAME = "processor.json"

_FAMILIES = {"Qwen3VLProcessor": "qwen3_vl"}

_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Qwen's names; a fitted tokenizer gives them the ids 0 to 6."""

_DEFAULT_MAX_AREA_PX = 65_536
_NUM_BYTES = 256
_MAX_FITTED_CHARS = 10_000

_CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {%- set items = [{'type': 'text', 'text': message['content']}] %}
    {%- else %}
        {%- set items = message['content'] %}
    {%- endif %}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {%- for item in items if 'text' in item %}
                {{- item['text'] }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {%- for item in items %}
            {%- if 'text' in item %}
                {{- item['text'] }}
            {%- elif item['type'] == 'image' or 'image' in item or 'image_url' in item %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- endif %}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


class ProcessorParams(Section):
    """Where the processor comes from.

    `fit` trains a tokenizer on the training split and takes the image settings given here; `load`
    takes `source`, a local folder or a hub id, and changes only the area bounds that are given.
    """

    mode: Literal["fit", "load"] = "fit"
    source: str | None = None
    vocab_size: int = Field(default=512, ge=len(_SPECIAL_TOKENS) + _NUM_BYTES)
    patch_px: int = Field(default=8, ge=1)
    merge: int = Field(default=2, ge=1)
    temporal_patch: int = Field(default=1, ge=1)
    min_area_px: int | None = Field(default=None, ge=1)
    max_area_px: int | None = Field(default=None, ge=1)


def fit(sample_index: Path, params: ProcessorParams, folder: str) -> Path:
    """Fit or load the processor, and write its folder.

    Args:
        sample_index: The folder of `core.tables.SAMPLE_INDEX`; only the training split is read.
        params: where it comes from.
        folder: the folder that is written, at once or not at all.

    Raises:
        ConfigError: `source` is missing, cannot be loaded, or is of a family that is not built.
        DataError: nothing to fit a tokenizer on.
    """
    if params.mode == "fit":
        processor = _fit(_training_texts(sample_index), params=params)
    else:
        processor = _load(params)
    target = Path(folder)
    with replacing_folder(target) as partial:
        processor.save_pretrained(str(partial))
        info = _describe(processor, folder=partial)
        text = json.dumps(info.model_dump(mode="json"), indent=2, sort_keys=True)
        write_text(partial / INFO_NAME, text=text + "\n")
    return target


def read_processor_info(folder: Path) -> ProcessorInfo:
    """Read what others need to know of a processor.

    Raises:
        FormatError: `processor.json` is missing, damaged or of another version.
    """
    path = folder / INFO_NAME
    cure = "Run `kedro run --pipelines=prepare`, which writes the processor's folder"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        version = value["version"]
        if version != FORMAT_VERSION:
            raise FormatError(
                f"'{path}' is of version {version}",
                allowed=f"This release reads version {FORMAT_VERSION}",
                cure=cure,
            )
        return ProcessorInfo.model_validate(value)
    except FileNotFoundError as error:
        raise FormatError(f"There is no file '{path}'", cure=cure) from error
    except (json.JSONDecodeError, KeyError, TypeError, ValidationError) as error:
        raise FormatError(f"'{path}' is damaged: {error}", cure=cure) from error


def _training_texts(sample_index: Path) -> Iterator[str]:
    """Yield what the tokenizer will meet between special tokens: roles and texts.

    Of a long text only the start: a word of a million letters would keep the training for minutes.
    """
    for part in read_parts(sample_index, columns=["split", "messages"]):
        for value in part.filter(pc.field("split") == "train")["messages"].to_pylist():
            for turn in to_chat([Message(**message) for message in json.loads(value)]):
                yield turn["role"] + "\n"
                texts = (item["text"] for item in turn["content"] if "text" in item)
                yield from (text[:_MAX_FITTED_CHARS] for text in texts)


def _fit(texts: Iterable[str], *, params: ProcessorParams) -> Qwen3VLProcessor:
    from transformers import (
        Qwen2Tokenizer,
        Qwen2VLImageProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    merges: Any
    vocab, merges = _train_bpe(texts, vocab_size=params.vocab_size)
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=[
            token for token in _SPECIAL_TOKENS if token not in ("<|im_end|>", "<|endoftext|>")
        ],
    )
    areas = {
        "shortest_edge": params.min_area_px or (params.patch_px * params.merge) ** 2,
        "longest_edge": params.max_area_px or _DEFAULT_MAX_AREA_PX,
    }
    _check_areas(areas, factor_px=params.patch_px * params.merge)
    cuts: dict[str, Any] = {
        "patch_size": params.patch_px,
        "merge_size": params.merge,
        "temporal_patch_size": params.temporal_patch,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=areas, **cuts),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**cuts),
        chat_template=_CHAT_TEMPLATE,
    )


def _train_bpe(
    texts: Iterable[str], *, vocab_size: int
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train a byte-level BPE that splits text as Qwen does; each digit is a token of its own."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    read = iter(texts)
    first = next(read, None)
    if first is None:
        raise DataError(
            "The training split has no message to fit a tokenizer on",
            allowed="`prepare.processor.mode: fit` needs at least one training sample",
            cure="Check `prepare.sources`, or load a processor (`mode: load`)",
        )
    tokenizer.train_from_iterator((text for part in ((first,), read) for text in part), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def _load(params: ProcessorParams) -> Qwen3VLProcessor:
    from transformers import AutoProcessor

    if params.source is None:
        raise ConfigError(
            "`prepare.processor.mode: load` has no source",
            allowed="A local folder or a hub id",
            cure="Set prepare.processor.source",
        )
    try:
        processor = AutoProcessor.from_pretrained(params.source)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The processor '{params.source}' cannot be loaded: {error}",
            allowed="A local folder or a hub id that AutoProcessor loads without remote code",
            cure="Check prepare.processor.source, and the network if it is a hub id",
        ) from error
    name = type(processor).__name__
    if name not in _FAMILIES:
        raise ConfigError(
            f"'{params.source}' holds a {name}",
            allowed=f"Built: {', '.join(sorted(_FAMILIES))}",
            cure="Name a processor of a family that is built",
        )
    image_processor = processor.image_processor
    areas = {
        "shortest_edge": params.min_area_px or image_processor.size["shortest_edge"],
        "longest_edge": params.max_area_px or image_processor.size["longest_edge"],
    }
    _check_areas(areas, factor_px=image_processor.patch_size * image_processor.merge_size)
    image_processor.size = areas
    return processor


def _check_areas(areas: dict[str, int], *, factor_px: int) -> None:
    low, high = areas["shortest_edge"], areas["longest_edge"]
    if high < max(low, factor_px**2):
        raise ConfigError(
            f"Images between min_area_px {low} and max_area_px {high} px cannot be made",
            allowed=f"max_area_px is at least min_area_px and {factor_px**2} px, one image token",
            cure="Raise prepare.processor.max_area_px or lower min_area_px",
        )


def _describe(processor: Qwen3VLProcessor, *, folder: Path) -> ProcessorInfo:
    tokenizer, image = processor.tokenizer, processor.image_processor
    return ProcessorInfo(
        family=_FAMILIES[type(processor).__name__],
        image=ImageSettings(
            patch_px=image.patch_size,
            merge=image.merge_size,
            temporal_patch=image.temporal_patch_size,
            min_area_px=image.size["shortest_edge"],
            max_area_px=image.size["longest_edge"],
        ),
        tokens=TokenIds(
            num_tokens=len(tokenizer),
            pad=tokenizer.pad_token_id,
            eos=tokenizer.eos_token_id,
            image=processor.image_token_id,
            video=processor.video_token_id,
            vision_start=processor.vision_start_token_id,
            vision_end=processor.vision_end_token_id,
        ),
        sha256=sha256_folder(folder, exclude=frozenset({INFO_NAME})),
    )
