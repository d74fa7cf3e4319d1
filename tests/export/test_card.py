"""The model card tells where a model comes from, and its first example works."""

import re

from PIL import Image

from diptych.core.records import ContrastSpec, Manifest, ModelSpec, Parent, Shard
from diptych.core.release import read_score_section
from diptych.export.card import count_parameters, render


def test_the_card_names_data_run_and_settings(written, trained, corpus):
    card = (written / "README.md").read_text()
    assert corpus.manifest.sha256 in card
    assert trained.run.run_id in card
    assert trained.spec.identity.sha256 in card
    assert "| digits | heldout | 24 |" in card
    assert "| digits | train | 80 |" in card
    assert "| steps | 6 of 8 rows |" in card
    assert "| final loss | 2.3457 |" in card
    assert "| held-out loss | 2.5000 |" in card
    assert "| 3 samples masked, 1 steps skipped |" in card
    assert "1 min 15 s in 1 attempt |" in card
    assert "ddp, 1 rank on cpu, fp32" in card
    assert read_score_section(card) == "Not scored yet."
    assert str(written.parent.parent) not in card


def test_its_example_is_eight_lines_and_runs(written, tmp_path, monkeypatch, capsys):
    card = (written / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    assert len(code.strip().splitlines()) <= 8
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 24), (200, 30, 30)).save("picture.png")
    exec(code.replace("path/to/this/folder", str(written)), {})
    assert capsys.readouterr().out


def test_parameters_are_counted_from_the_files(written, trained):
    assert count_parameters(written) == sum(tensor.numel() for tensor in trained.weights.values())


def make_shard(source, split, *, num_samples, num_images):
    return Shard(
        path=f"{split}/{source}-{num_samples}.tar",
        index_path="i",
        split=split,
        source=source,
        num_samples=num_samples,
        num_images=num_images,
        num_bytes=1,
        sha256="0",
        index_sha256="0",
    )


def test_shards_are_summed_per_source_and_split(written, trained):
    manifest = Manifest(
        shards=(
            make_shard("b", "train", num_samples=5, num_images=7),
            make_shard("a", "train", num_samples=1, num_images=0),
            make_shard("b", "train", num_samples=6, num_images=8),
            make_shard("b", "heldout", num_samples=2, num_images=2),
        ),
        quarantined={"a": {"missing_image": 2, "empty_answer": 1}},
    )
    identity = trained.spec.identity.model_copy(
        update={"model": ModelSpec(weights="some-team/some-model")}
    )
    spec = trained.spec.model_copy(update={"identity": identity})
    run = trained.run.model_copy(update={"final_heldout_loss": None, "num_attempts": 2})
    card = render(
        run=run, spec=spec, manifest=manifest, weights="trained", dtype="fp32", release=written
    )
    rows = [line for line in card.splitlines() if line.startswith(("| a |", "| b |"))]
    assert rows == ["| a | train | 1 | 0 |", "| b | heldout | 2 | 2 |", "| b | train | 11 | 15 |"]
    assert "3 samples were quarantined before training (empty_answer: 1, missing_image: 2)" in card
    assert "base_model: some-team/some-model" in card
    assert "held-out loss" not in card
    assert "in 2 attempts" in card


def test_the_card_says_which_weights_it_began_with(written, trained, corpus):
    def card(**weights):
        model = ModelSpec(**weights)
        identity = trained.spec.identity.model_copy(update={"model": model})
        spec = trained.spec.model_copy(update={"identity": identity})
        return render(
            run=trained.run,
            spec=spec,
            manifest=corpus.manifest,
            weights="trained",
            dtype="fp32",
            release=written,
        )

    found = card(weights="someone/vlm", revision="0123abcd", weights_sha256="ffff")
    assert "\nbase_model: someone/vlm\n" in found
    row = "\n| began with | someone/vlm, revision `0123abcd`, digest `ffff` |\n| steps |"
    assert row in found
    assert "began with" not in card()
    towers = {"vision": {"weights": "a/v", "weights_sha256": "1"}, "language": {"weights": "b/l"}}
    found = card(family="llava", towers=towers)
    assert "\nbase_model: [a/v, b/l]\n" in found
    assert "\n| began with | a/v, digest `1`; b/l |\n" in found


def test_the_card_says_what_was_learnt_beside_language(written, trained, corpus):
    def card(contrast):
        identity = trained.spec.identity.model_copy(update={"contrast": contrast})
        return render(
            run=trained.run,
            spec=trained.spec.model_copy(update={"identity": identity}),
            manifest=corpus.manifest,
            weights="trained",
            dtype="fp32",
            release=written,
        )

    row = "\n| contrastive loss | sigmoid, weight 0.25, scale 8.0, bias -4.0 |\n| seed |"
    assert row in card(ContrastSpec(weight=0.25, scale=8.0, bias=-4.0))
    assert "contrastive" not in card(None)


def test_the_card_names_the_checkpoint_that_a_run_was_forked_from(written, trained, corpus):
    def card(parent):
        identity = trained.spec.identity.model_copy(update={"parent": parent})
        return render(
            run=trained.run,
            spec=trained.spec.model_copy(update={"identity": identity}),
            manifest=corpus.manifest,
            weights="trained",
            dtype="fp32",
            release=written,
        )

    parent = Parent(run_id="0123456789ab", step=7, sha256="ffff", keeps="weights")
    row = "| forked from | step 7 of run `0123456789ab`, its weights alone, checkpoint `ffff` |"
    assert f"\n{row}\n| steps |" in card(parent)
    assert "in 1 attempt, since the fork |" in card(parent)
    assert "fork" not in card(None)
