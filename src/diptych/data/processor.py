"""The processor: tokenizer, chat template and image settings in one folder.

The training split's messages flow in (mode `fit`) or a folder or hub id (mode `load`); a folder
that transformers' AutoProcessor loads flows out, with `processor.json` beside its files. How a
conversation becomes tokens is `data/encode.py`'s business. Equal inputs give equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc
from pydantic import Field, ValidationError

from diptych.core.errors import ConfigError, DataError, FormatError
from diptych.core.files import replacing_folder, write_text
from diptych.core.hashing import sha256_folder, sha256_json
from diptych.core.records import (
    FORMAT_VERSION,
    IMAGE_PLACEHOLDER,
    Message,
    ProcessorInfo,
    Section,
    TileSettings,
)
from diptych.core.tables import read_parts
from diptych.data import described, fitted
from diptych.data.chat import ChatTokenizer, to_chat

INFO_NAME = "processor.json"

_NUM_BYTES = 256
"""A fitted tokenizer has a token for each, beside those that are a family's own."""

_MAX_FITTED_CHARS = 10_000
_PROBE = "an answer that only an assistant gives"


class ProcessorParams(Section):
    """Where the processor comes from.

    `fit` trains a tokenizer on the training split and takes the family and the image settings given
    here; `load` takes `source`, a local folder or a hub id, and changes only the area bounds that
    are given. `merge` says how many patches a side make one token, in families of grids, in gemma3
    and in smolvlm. `temporal_patch` and the areas are for families that see an image as one grid,
    `tile_px` is for those that see tiles. `max_tiles` is how many an image is cut into at most, or
    (LLaVA-OneVision) the tokens of how many it keeps; null takes the family's own number. SmolVLM
    takes `max_side_px`, what an image's longer side is scaled to before it is cut; null is four
    tiles.
    """

    mode: Literal["fit", "load"] = "fit"
    source: str | None = None
    family: str = "qwen3_vl"
    vocab_size: int = Field(default=512, ge=_NUM_BYTES)
    patch_px: int = Field(default=8, ge=1)
    merge: int = Field(default=2, ge=1)
    temporal_patch: int = Field(default=1, ge=1)
    tile_px: int = Field(default=64, ge=1)
    max_tiles: int | None = Field(default=None, ge=1)
    max_side_px: int | None = Field(default=None, ge=1)
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
        _check_template(partial)
        info = _describe(processor, folder=partial)
        _check_image(partial, info=info)
        text = json.dumps(info.model_dump(mode="json"), indent=2, sort_keys=True)
        write_text(partial / INFO_NAME, text=text + "\n")
    return target


def vocabulary_sha256(folder: Path) -> str | None:
    """Hash which id every token has: equal where two processors give weights the same meaning.

    How text is cut into tokens, images and the chat template are left out. None: there is no
    tokenizer.json.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    added = [[token["id"], token["content"]] for token in tokenizer.get("added_tokens", ())]
    return sha256_json([tokenizer["model"]["vocab"], sorted(added)])


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


def _fit(texts: Iterable[str], *, params: ProcessorParams) -> Any:
    recipe = fitted.recipe(params.family)
    least = _NUM_BYTES + len(recipe.special_tokens)
    if params.vocab_size < least:
        raise ConfigError(
            f"prepare.processor.vocab_size is {params.vocab_size}",
            allowed=f"At least {least}: {_NUM_BYTES} bytes, and the special tokens of "
            f"'{params.family}'",
            cure=f"Set it to {least} or more",
        )
    vocab, merges = _train_bpe(
        texts, vocab_size=params.vocab_size, special_tokens=recipe.special_tokens
    )
    processor = recipe.build(vocab, merges, params)
    if params.min_area_px or params.max_area_px:
        described.set_areas(processor, low=params.min_area_px, high=params.max_area_px)
    return processor


def _train_bpe(
    texts: Iterable[str], *, vocab_size: int, special_tokens: Sequence[str]
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
        special_tokens=list(special_tokens),
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


def _load(params: ProcessorParams) -> Any:
    from transformers import AutoProcessor

    if params.source is None:
        raise ConfigError(
            "`prepare.processor.mode: load` has no source",
            allowed="A local folder or a hub id",
            cure="Set prepare.processor.source",
        )
    try:
        # Left out, transformers would ask at the terminal whether to run the code.
        processor = AutoProcessor.from_pretrained(params.source, trust_remote_code=False)
    except ImportError as error:
        if "num2words" in str(error):
            described.check_num2words(source=params.source)
        raise ConfigError(
            f"The processor '{params.source}' needs a package: {error}",
            cure="Install the package that it names",
        ) from error
    except Exception as error:
        # Transformers checks files by using them: any error can come of a wrong or hostile one.
        raise _refusal(params.source, error=error) from error
    described.describe(processor, source=params.source)
    if not processor.chat_template:
        raise ConfigError(
            f"The processor '{params.source}' has no chat template",
            allowed="A processor with chat_template.jinja, as instruct models have it",
            cure="Load the processor of an instruct model, or put a chat_template.jinja beside it",
        )
    if params.min_area_px or params.max_area_px:
        described.set_areas(processor, low=params.min_area_px, high=params.max_area_px)
    return processor


def _refusal(source: str, *, error: Exception) -> ConfigError:
    if "trust_remote_code" in str(error):
        return ConfigError(
            f"The processor '{source}' is code that comes with it (auto_map)",
            allowed="Processors of the installed transformers; code of others is never run",
            cure="Choose one in transformers' own format (often a repository named -hf)",
        )
    return ConfigError(
        f"The processor '{source}' cannot be loaded: {_first_line(error)}",
        allowed="A local folder or a hub id that AutoProcessor loads without remote code",
        cure="Check prepare.processor.source, and the network if it is a hub id",
    )


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return lines[0] if isinstance(error, OSError | ValueError) else f"{error!r:.200}"


def _check_template(folder: Path) -> None:
    """Refuse a chat template that leaves the assistant's turns out: nothing would be learnt."""
    tokenizer = ChatTokenizer(folder)
    question, answer = Message(role="user", text="?"), Message(role="assistant", text=_PROBE)
    if _PROBE not in tokenizer.render(to_chat([question, answer])):
        raise ConfigError(
            "The processor's chat template writes no turns of the assistant",
            allowed="A template that writes every turn, as a model's instruct version has it",
            cure="Load the processor of an instruct model, or give it another chat_template.jinja",
        )


def _check_image(folder: Path, *, info: ProcessorInfo) -> None:
    """Refuse a chat template that writes something else for an image than the processor reads."""
    tokenizer, image = ChatTokenizer(folder), info.image
    question = Message(role="user", text=IMAGE_PLACEHOLDER)
    text = tokenizer.render(to_chat([question, Message(role="assistant", text="!")]))
    if isinstance(image, TileSettings):
        num_found = text.count(image.placeholder)
    else:
        num_found = tokenizer.tokenize(text)[0].count(info.tokens.image)
    if num_found != 1:
        raise ConfigError(
            f"The processor's chat template writes {num_found} image tokens for an image: {text!r}",
            allowed="One, in whose place the processor puts as many as the image has",
            cure="Load the processor of an instruct model, or give it another chat_template.jinja",
        )


def _describe(processor: Any, *, folder: Path) -> ProcessorInfo:
    found = described.describe(processor, source=str(folder))
    return ProcessorInfo(
        family=found.family,
        image=found.image,
        tokens=found.tokens,
        sha256=sha256_folder(folder, exclude=frozenset({INFO_NAME})),
    )
