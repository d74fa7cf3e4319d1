from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diptych.core.errors import ConfigError, DataError, FormatError
from diptych.core.hashing import sha256_folder
from diptych.core.records import FORMAT_VERSION
from diptych.core.tables import SAMPLE_INDEX
from diptych.data.processor import INFO_NAME, ProcessorParams, fit, read_processor_info

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]


def make_index(folder, *, heldout_answer="nine", question="Which number is written here?"):
    """An index of questions in two parts; the held-out split says what training never does."""

    def row(number, split, answer):
        messages = [
            {"role": "user", "text": "<image>\n" + question},
            {"role": "assistant", "text": answer},
        ]
        return {
            "key": f"toy/{split}-{number}",
            "split": split,
            "messages": json.dumps(messages),
            "status": "ok",
        }

    rows = [row(number, "train", str(number * 37)) for number in range(40)]
    rows.append(row(0, "heldout", heldout_answer))
    return write_index(folder, rows[:30], rows[30:])


def write_index(folder, *parts):
    target = folder / "sample_index"
    target.mkdir(exist_ok=True)
    for number, rows in enumerate(parts):
        table = pa.Table.from_pylist(rows, schema=SAMPLE_INDEX)
        pq.write_table(table, target / f"{number:06d}.parquet")
    return target


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitted") / "processor"
    return fit(
        make_index(folder.parent), ProcessorParams(min_area_px=256, max_area_px=4096), str(folder)
    )


@pytest.fixture(scope="module")
def loaded(fitted):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(fitted, local_files_only=True)


def test_transformers_loads_it(loaded):
    assert type(loaded).__name__ == "Qwen3VLProcessor"
    assert loaded.video_processor is not None


def test_special_tokens_have_the_lowest_ids(loaded):
    tokenizer = loaded.tokenizer
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == [0, 1, 2, 3, 4, 5, 6]
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    text = "".join(SPECIAL_TOKENS)
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == ""


def test_each_digit_is_a_token(loaded):
    tokens = loaded.tokenizer.tokenize("Which number is written here? 90210 is.")
    assert [token for token in tokens if any(map(str.isdigit, token))] == list("90210")


def test_any_text_comes_back(loaded):
    text = "Zürich\n\n  naïve 12é 漢字 🙂\t<b>"
    assert loaded.tokenizer.decode(loaded.tokenizer(text)["input_ids"]) == text


def test_words_of_the_training_split_are_single_tokens(loaded):
    assert loaded.tokenizer.tokenize("assistant") == ["assistant"]
    assert len(loaded.tokenizer.tokenize("nine")) > 1


def test_the_vocabulary_is_bounded(tmp_path):
    small = fit(make_index(tmp_path), ProcessorParams(vocab_size=270), str(tmp_path / "small"))
    assert read_processor_info(small).tokens.num_tokens == 270


def test_info_says_what_transformers_says(fitted, loaded):
    info = read_processor_info(fitted)
    image = loaded.image_processor
    assert info.family == "qwen3_vl"
    assert (info.image.patch_px, info.image.merge) == (image.patch_size, image.merge_size)
    assert info.image.temporal_patch == image.temporal_patch_size == 1
    assert image.size["shortest_edge"] == info.image.min_area_px == 256
    assert image.size["longest_edge"] == info.image.max_area_px == 4096
    assert info.tokens.num_tokens == len(loaded.tokenizer)
    assert info.tokens.model_dump(exclude={"num_tokens"}) == {
        "pad": loaded.tokenizer.pad_token_id,
        "eos": loaded.tokenizer.eos_token_id,
        "image": loaded.image_token_id,
        "video": loaded.video_token_id,
        "vision_start": loaded.vision_start_token_id,
        "vision_end": loaded.vision_end_token_id,
    }


def test_the_hash_covers_every_other_file(fitted, tmp_path):
    info = read_processor_info(fitted)
    copy = tmp_path / "copy"
    shutil.copytree(fitted, copy)
    assert sha256_folder(copy, exclude=frozenset({INFO_NAME})) == info.sha256
    (copy / "chat_template.jinja").write_text("{{ 1 }}")
    assert sha256_folder(copy, exclude=frozenset({INFO_NAME})) != info.sha256


def test_equal_inputs_give_equal_bytes(fitted, tmp_path):
    params = ProcessorParams(min_area_px=256, max_area_px=4096)
    again = fit(make_index(tmp_path, heldout_answer="other"), params, str(tmp_path / "again"))
    assert sha256_folder(again) == sha256_folder(fitted), "held-out text must change nothing"
    other = fit(make_index(tmp_path, question="Read it."), params, str(tmp_path / "other"))
    assert sha256_folder(other) != sha256_folder(fitted)


def test_the_folder_is_replaced_at_once_or_not_at_all(tmp_path):
    folder = tmp_path / "processor"
    folder.mkdir()
    (folder / "stale.txt").write_text("from before")
    with pytest.raises(DataError, match="no message to fit a tokenizer on"):
        fit(write_index(tmp_path), ProcessorParams(), str(folder))
    assert [path.name for path in folder.iterdir()] == ["stale.txt"]
    fit(make_index(tmp_path), ProcessorParams(), str(folder))
    assert not (folder / "stale.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["processor", "sample_index"]


def test_the_template_marks_what_the_assistant_says(loaded):
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Which number?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "37"}]},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "74"},
    ]
    out = loaded.apply_chat_template(
        chat,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        return_tensors="pt",
    )
    text = loaded.apply_chat_template(chat, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhich number?<|im_end|>\n"
        "<|im_start|>assistant\n37<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n74<|im_end|>\n"
    )
    said = out["input_ids"][0][out["assistant_masks"][0].bool()]
    assert loaded.tokenizer.decode(said) == "37<|im_end|>74<|im_end|>"
    prompt = loaded.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("Which number?<|im_end|>\n<|im_start|>assistant\n")


def test_a_folder_is_loaded_and_its_areas_changed(fitted, tmp_path):
    params = ProcessorParams(mode="load", source=str(fitted), max_area_px=2048)
    folder = fit(make_index(tmp_path), params, str(tmp_path / "loaded"))
    before, after = read_processor_info(fitted), read_processor_info(folder)
    assert (after.image.min_area_px, after.image.max_area_px) == (256, 2048)
    assert after.tokens == before.tokens
    assert (folder / "tokenizer.json").read_bytes() == (fitted / "tokenizer.json").read_bytes()
    assert str(fitted) not in "".join(path.read_text() for path in folder.iterdir())
    unchanged = fit(
        make_index(tmp_path),
        ProcessorParams(mode="load", source=str(fitted)),
        str(tmp_path / "unchanged"),
    )
    assert read_processor_info(unchanged).image == before.image


def test_load_asks_for_a_source(tmp_path):
    with pytest.raises(ConfigError, match=r"no source.*prepare\.processor\.source"):
        fit(make_index(tmp_path), ProcessorParams(mode="load"), str(tmp_path / "processor"))


def test_a_source_that_is_not_there_is_refused(tmp_path):
    params = ProcessorParams(mode="load", source=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"nowhere' cannot be loaded"):
        fit(make_index(tmp_path), params, str(tmp_path / "processor"))
    assert not (tmp_path / "processor").exists()


def test_another_family_is_refused(tmp_path, monkeypatch):
    import transformers

    class BlipProcessor:
        pass

    monkeypatch.setattr(
        transformers.AutoProcessor, "from_pretrained", lambda *_, **__: BlipProcessor()
    )
    params = ProcessorParams(mode="load", source="someone/blip")
    with pytest.raises(ConfigError, match=r"'someone/blip' holds a BlipProcessor.*Qwen3VL"):
        fit(make_index(tmp_path), params, str(tmp_path / "processor"))


def test_areas_that_hold_no_image_are_refused(tmp_path):
    params = ProcessorParams(max_area_px=255)
    with pytest.raises(ConfigError, match="at least min_area_px and 256 px"):
        fit(make_index(tmp_path), params, str(tmp_path / "processor"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"version": 1', '"version": 7'), "is of version 7"),
        (lambda text: text[:-20], "is damaged"),
        (lambda text: text.replace('"family"', '"famly"'), "is damaged"),
    ],
)
def test_a_damaged_info_is_refused(fitted, tmp_path, change, message):
    assert FORMAT_VERSION == 1
    copy = tmp_path / "copy"
    shutil.copytree(fitted, copy)
    path = copy / INFO_NAME
    path.write_text(change(path.read_text()))
    with pytest.raises(FormatError, match=message):
        read_processor_info(copy)


def test_a_missing_info_is_refused(tmp_path):
    with pytest.raises(FormatError, match="There is no file"):
        read_processor_info(tmp_path)


def test_what_nodes_import_knows_no_torch():
    code = (
        "import sys, diptych.data.processor, diptych.data.costs, diptych.data.schedule.schedule, "
        "diptych.data.schedule.assign, diptych.data.encode; "
        "sys.exit(bool({'torch', 'transformers', 'tokenizers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_processor_with_code_of_its_own_is_refused_and_nobody_is_asked(
    fitted, tmp_path, monkeypatch
):
    source = tmp_path / "theirs"
    shutil.copytree(fitted, source)
    config = json.loads((source / "processor_config.json").read_text())
    config |= {"processor_class": "Theirs", "auto_map": {"AutoProcessor": "evil.Theirs"}}
    (source / "processor_config.json").write_text(json.dumps(config))
    (source / "evil.py").write_text("raise SystemExit('it ran')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    params = ProcessorParams(mode="load", source=str(source))
    with pytest.raises(ConfigError, match=r"auto_map.*code of others is never run"):
        fit(tmp_path, params, str(tmp_path / "processor"))
    assert not (tmp_path / "processor").exists()


def test_a_processor_without_a_chat_template_is_refused(fitted, tmp_path):
    source = tmp_path / "theirs"
    shutil.copytree(fitted, source)
    (source / "chat_template.jinja").unlink()
    params = ProcessorParams(mode="load", source=str(source))
    with pytest.raises(ConfigError, match="theirs' has no chat template"):
        fit(tmp_path, params, str(tmp_path / "processor"))
