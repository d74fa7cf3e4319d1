import pytest
import torch
from transformers import AutoModelForImageTextToText

from diptych.core.errors import ConfigError
from diptych.model.assemble import build
from diptych.shape.families import family

LENGTH = 30


def collated(image_settings, rows):
    """Rows of (token ids, grids) as the loader collates them: right padded, positions by shape."""
    ids = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    mask = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    positions = torch.zeros(3, len(rows), LENGTH, dtype=torch.long)
    for row, (tokens, grids) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        found = family("qwen3_vl").position_ids(
            ids[row, : len(tokens)].numpy(), grids=grids, image=image_settings, image_token_id=2
        )
        positions[:, row, : len(tokens)] = torch.from_numpy(found)
    grid = torch.tensor([[1, *grid] for _, grids in rows for grid in grids])
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 8 * 8)
    return ids, mask, positions, pixels, grid


def test_forward_without_mask_equals_transformers_own(starter_model, image_settings):
    torch.manual_seed(0)
    rows = [
        ([9, 4, *[2] * 6, 5, 10, 11, 12], [(4, 6)]),
        ([20, 4, *[2] * 4, 5, 4, *[2] * 2, 5, 30, 31], [(4, 4), (2, 4)]),
        ([40, 41, 42, 43, 44], []),
        ([9, 4, *[2] * 6, 5, *range(50, 70)], [(6, 4)]),
    ]
    ids, mask, positions, pixels, grid = collated(image_settings, rows)
    with torch.no_grad():
        expected = starter_model(
            input_ids=ids,
            attention_mask=mask,
            mm_token_type_ids=(ids == 2).int(),
            pixel_values=pixels,
            image_grid_thw=grid,
            use_cache=False,
        ).logits
        hidden = starter_model.model(
            input_ids=ids,
            position_ids=positions,
            pixel_values=pixels,
            image_grid_thw=grid,
            attention_mask=None,
            use_cache=False,
        ).last_hidden_state
        ours = starter_model.lm_head(hidden)
    real = mask.bool()
    assert (ours[real] - expected[real]).abs().max() <= 1e-6
    assert ours[real].std() > 1e-2


def test_equal_seeds_give_equal_weights(model_spec, token_ids, image_settings):
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    first = build(model_spec, tokens=token_ids, image=image_settings, seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(12)
    again = build(model_spec, tokens=token_ids, image=image_settings, seed=5)
    other = build(model_spec, tokens=token_ids, image=image_settings, seed=6)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])


def test_first_logits_are_near_uniform(starter_model):
    """A fresh model's loss is that of guessing: log(512) = 6.238."""
    ids = torch.arange(6, 406).reshape(8, 50)
    with torch.no_grad():
        logits = starter_model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(6.238, abs=0.15)


def test_meta_model_allocates_nothing(model_spec, token_ids, image_settings):
    model = build(model_spec, tokens=token_ids, image=image_settings, seed=0, device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_model_without_seed_has_its_buffers(model_spec, token_ids, image_settings, starter_model):
    model = build(model_spec, tokens=token_ids, image=image_settings, seed=None)
    for name, value in starter_model.named_buffers():
        assert torch.equal(value, model.get_buffer(name)), name


def test_config_carries_the_processors_numbers(starter_model, token_ids):
    config = starter_model.config
    assert config.image_token_id == token_ids.image
    assert config.vision_start_token_id == token_ids.vision_start
    assert config.text_config.rope_parameters["mrope_section"] == [6, 5, 5]
    assert config.vision_config.patch_size == 8
    assert starter_model.generation_config.eos_token_id == token_ids.eos
    assert starter_model.generation_config.pad_token_id == token_ids.pad


def test_saved_model_loads_as_plain_transformers(starter_model, tmp_path):
    starter_model.save_pretrained(tmp_path)
    assert "attn" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    for name, weight in starter_model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name


def test_processor_with_other_patches_is_refused(model_spec, token_ids, image_settings):
    other = image_settings.model_copy(update={"patch_px": 16})
    with pytest.raises(ConfigError, match="patch_size is 8, the processor's is 16"):
        build(model_spec, tokens=token_ids, image=other, seed=0)
