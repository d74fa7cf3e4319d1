"""Promise 4, same model out: a true release passes, and every kind of false one is caught."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from diptych.core.errors import FormatError, ParityError, RunError
from diptych.core.release import release_sha256
from diptych.export import reload
from diptych.export.samples import Output
from diptych.export.verify import compare, verify
from diptych.export.write import ExportParams, write
from tests.export.conftest import seal
from tests.runs import save_checkpoint

PARAMS = ExportParams(num_samples=6)
WEIGHT = "model.language_model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def here(monkeypatch):
    """Run the reloading in this process: quicker, where the fresh process is not the point."""

    def run_here(commands, **_):
        for module, *arguments in commands:
            assert module == "diptych.export.reload"
            reload.main(arguments)

    monkeypatch.setattr("diptych.export.verify.run_modules", run_here)


def test_same_model_out_in_a_fresh_process(written, trained, tmp_path, monkeypatch):
    # The child writes down what it had imported when it ends.
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, sys\n"
        "path = os.environ['IMPORTED']\n"
        "atexit.register(lambda: open(path, 'w').write(' '.join(sys.modules)))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("IMPORTED", str(tmp_path / "imported"))
    parity = verify(written, trained.run, PARAMS)
    assert parity.passed
    assert parity.tokens_equal
    assert parity.max_abs <= 1e-5
    assert parity.num_samples == 6
    assert parity.num_logits > 6 * 512
    assert parity.missing_keys == parity.extra_keys == ()
    assert parity.release_sha256 == release_sha256(written)
    assert parity.run_id == trained.run.run_id
    imported = set((tmp_path / "imported").read_text().split())
    assert "transformers" in imported
    ours = ("diptych.model", "diptych.train", "diptych.parallel", "kedro")
    assert not [name for name in imported if name.startswith(ours)]


def test_a_bf16_release_is_held_against_the_rounded_weights(trained, corpus, tmp_path, here):
    params = PARAMS.model_copy(update={"dtype": "bf16"})
    folder = write(trained.run, corpus.processor, corpus.manifest, params, str(tmp_path / "r"))
    parity = verify(folder, trained.run, params)
    assert parity.max_abs <= parity.tolerance == 1e-5


@pytest.fixture
def with_means(trained, tmp_path):
    """The run with a checkpoint that holds the mean of one weight beside the weights."""
    mean = trained.weights[WEIGHT] * 0.5
    folder = tmp_path / "checkpoints" / "step-00000006"
    save_checkpoint(folder, trained.weights, means={WEIGHT: mean})
    return trained.run.model_copy(update={"checkpoint": str(folder)}), mean


def test_a_release_of_the_mean_is_held_against_the_mean(with_means, corpus, tmp_path, here):
    run, mean = with_means
    params = PARAMS.model_copy(update={"weights": "ema"})
    folder = write(run, corpus.processor, corpus.manifest, params, str(tmp_path / "r"))
    weights = load_file(folder / "model.safetensors")
    assert np.array_equal(weights[WEIGHT], mean)
    assert verify(folder, run, params).max_abs <= 1e-5
    with pytest.raises(ParityError, match=f"1 with other values than the checkpoint .{WEIGHT}"):
        verify(folder, run, PARAMS)
    assert "| weights | their exponential moving average" in (folder / "README.md").read_text()


def test_without_a_mean_its_release_is_refused(trained, corpus, tmp_path):
    params = PARAMS.model_copy(update={"weights": "ema"})
    with pytest.raises(FormatError, match=r"no mean of the weights.*weights to trained"):
        write(trained.run, corpus.processor, corpus.manifest, params, str(tmp_path / "r"))
    assert not (tmp_path / "r").exists()


def change_weights(release, change, *, sealed=True):
    weights = load_file(release / "model.safetensors")
    change(weights)
    save_file(weights, release / "model.safetensors", metadata={"format": "pt"})
    if sealed:
        seal(release)


def test_a_changed_file_is_noticed_by_its_checksum(release, trained, here):
    change_weights(release, lambda weights: weights[WEIGHT].add_(1e-3), sealed=False)
    with pytest.raises(ParityError, match=r"not as they were written: model\.safetensors"):
        verify(release, trained.run, PARAMS)
    seal(release)
    (release / "extra.json").write_text("{}")
    with pytest.raises(ParityError, match=r"not as they were written: extra\.json"):
        verify(release, trained.run, PARAMS)


def test_a_card_may_change(release, trained, here):
    (release / "README.md").write_text("# Rewritten by a person\n")
    assert verify(release, trained.run, PARAMS).passed


def test_a_tampered_weight_is_named(release, trained, here):
    def nudge(weights):
        weights[WEIGHT][3, 5] += 1e-6  # far below what any logit would show

    change_weights(release, nudge)
    with pytest.raises(ParityError, match=f"1 with other values than the checkpoint .{WEIGHT}"):
        verify(release, trained.run, PARAMS)


def test_a_dropped_and_an_invented_weight_are_named(release, trained, here):
    def rename(weights):
        weights["model.visual.nowhere"] = weights.pop(WEIGHT)

    change_weights(release, rename)
    with pytest.raises(ParityError) as caught:
        verify(release, trained.run, PARAMS)
    assert f"1 missing ({WEIGHT})" in str(caught.value)
    assert "1 extra (model.visual.nowhere)" in str(caught.value)


def test_a_changed_chat_template_is_told_by_its_tokens(release, trained, here):
    path = release / "chat_template.jinja"
    path.write_text("{{- 'A chat:' }}" + path.read_text())
    seal(release)
    with pytest.raises(
        ParityError, match="token ids differ, so the tokenizer or the chat template"
    ):
        verify(release, trained.run, PARAMS)


def test_changed_image_settings_are_told_by_their_pixels(release, trained, here):
    path = release / "processor_config.json"
    config = json.loads(path.read_text())
    config["image_processor"]["image_mean"] = [0.48, 0.46, 0.41]
    path.write_text(json.dumps(config))
    seal(release)
    with pytest.raises(ParityError, match=r"the pixels differ by 0\.\d+, so the image settings"):
        verify(release, trained.run, PARAMS)


def test_a_changed_config_is_told_by_its_logits(release, trained, here):
    path = release / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["rope_parameters"]["rope_theta"] = 10_000.0
    path.write_text(json.dumps(config))
    seal(release)
    with pytest.raises(ParityError, match="so the config computes something else"):
        verify(release, trained.run, PARAMS)


def test_weights_that_transformers_cannot_place_are_named(release, trained, here):
    path = release / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["num_hidden_layers"] = 1
    path.write_text(json.dumps(config))
    seal(release)
    with pytest.raises(ParityError, match=r"extra \(model\.language_model\.layers\.1\."):
        verify(release, trained.run, PARAMS)


def test_a_release_that_does_not_load_fails_with_the_reason(release, trained, monkeypatch):
    def fail(commands, **_):
        with pytest.raises(ValueError, match="unheard_of") as caught:
            reload.main(commands[0][1:])
        raise RunError(str(caught.value))

    monkeypatch.setattr("diptych.export.verify.run_modules", fail)
    (release / "config.json").write_text('{"model_type": "unheard_of"}')
    seal(release)
    with pytest.raises(ParityError, match=r"cannot load and run the release(.|\n)*unheard_of"):
        verify(release, trained.run, PARAMS)


def test_missing_checksums_are_no_proof(release, trained):
    (release / "checksums.json").unlink()
    with pytest.raises(ParityError, match=r"no readable checksums\.json"):
        verify(release, trained.run, PARAMS)


def test_another_run_is_not_what_the_release_holds(release, trained, tmp_path, here):
    other = {name: tensor * 1.01 for name, tensor in trained.weights.items()}
    save_checkpoint(tmp_path / "step-00000012", other)
    run = trained.run.model_copy(update={"checkpoint": str(tmp_path / "step-00000012")})
    with pytest.raises(ParityError, match="with other values than the checkpoint"):
        verify(release, run, PARAMS)


def output(logits, *, ids=(1, 2), pixels=0.0):
    return Output(
        input_ids=np.array(ids),
        pixels=np.full((2, 2), pixels, np.float32),
        logits=np.array(logits, np.float32),
    )


def test_differences_are_the_largest_over_samples():
    trained = [output([[1.0, 2.0], [3.0, -8.0]]), output([[0.0, 0.0], [0.5, 0.5]])]
    released = [output([[1.0, 2.0], [3.0, -8.0]]), output([[0.0, 0.25], [0.5, 0.5]], pixels=0.5)]
    found = compare(released, trained=trained, keys=["a", "b"], tolerance=0.1)
    assert (found.max_abs, found.max_rel, found.first) == (0.25, 0.25 / 8, "b")
    assert (found.num_logits, found.tokens_equal, found.pixels_max_abs) == (8, True, 0.5)
    assert compare(released, trained=trained, keys=["a", "b"], tolerance=0.3).first is None


@pytest.mark.parametrize(
    "released",
    [
        output([[float("nan"), 2.0]]),
        output([[1.0, 2.0, 3.0]]),
        output([[1.0, float("inf")]]),
        output([[1.0, 2.0]], ids=(1, 3)),
    ],
    ids=["nan", "shape", "inf", "tokens"],
)
def test_what_cannot_be_compared_counts_as_differing(released):
    found = compare([released], trained=[output([[1.0, 2.0]])], keys=["a"], tolerance=1e3)
    assert found.first == "a"
