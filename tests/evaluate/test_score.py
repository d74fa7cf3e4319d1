"""The node: real processes on a real release, and summaries of hand-made predictions."""

import subprocess
import sys

import pyarrow as pa
import pytest

from diptych.core.errors import ParityError
from diptych.core.records import Buckets, Manifest
from diptych.core.release import read_score_section, release_sha256
from diptych.core.tables import PREDICTIONS
from diptych.evaluate import generate
from diptych.evaluate.score import (
    EvaluateParams,
    count_gpus,
    describe,
    score,
    summarise,
    tabulate,
)
from diptych.evaluate.tasks import collect

BUCKETS = Buckets(areas_px=(1_000,), aspects=())


def prediction(kind, *, bucket, correct, blind, image):
    return {
        "key": f"s/{image}",
        "turn": 0,
        "kind": kind,
        "bucket": bucket,
        "question": "?",
        "answer": "1",
        "prediction": "1" if correct else "2",
        "blind_prediction": "1" if blind else "2",
        "correct": correct,
        "blind_correct": blind,
        "image_key": image,
    }


def table(rows):
    return pa.Table.from_pylist(rows, schema=PREDICTIONS)


def test_summaries_are_means_per_kind_over_all_and_per_bucket():
    predictions = table(
        [
            prediction("read", bucket=1, correct=True, blind=False, image="a"),
            prediction("count", bucket=1, correct=False, blind=False, image="a"),
            prediction("read", bucket=2, correct=True, blind=True, image="b"),
            prediction("read", bucket=0, correct=False, blind=False, image="c"),
        ]
    )
    found = summarise(predictions, buckets=BUCKETS, params=EvaluateParams(num_resamples=200))
    seen = {kind: (value.value, value.n) for kind, value in found["exact_match"].items()}
    assert seen == {"read": (2 / 3, 3), "count": (0.0, 1), "all": (0.5, 4)}
    blind = {kind: value.value for kind, value in found["blind_exact_match"].items()}
    assert blind == {"read": 1 / 3, "count": 0.0, "all": 0.25}
    by_bucket = {name: (v.value, v.n) for name, v in found["exact_match_by_bucket"].items()}
    assert by_bucket == {
        "text only": (0.0, 1),
        "area under 1,000 px, aspect any": (0.5, 2),
        "area from 1,000 px, aspect any": (1.0, 1),
    }
    for group in found.values():
        assert all(value.low <= value.value <= value.high for value in group.values())


@pytest.fixture(scope="module")
def scored(release, corpus):
    params = EvaluateParams(num_processes=2, batch=8, max_new_tokens=4, device="cpu")
    return score(
        release.folder, release.parity, corpus.manifest, corpus.shards, corpus.buckets, params
    )


def test_score_answers_every_held_out_question(scored, release, corpus, reader):
    scores, predictions = scored
    questions = collect(reader, buckets=corpus.buckets, max_samples=None, seed=0)
    assert predictions.schema == PREDICTIONS
    assert predictions["key"].to_pylist() == [question.key for question in questions]
    assert predictions["answer"].to_pylist() == [question.answer for question in questions]
    assert scores.num_questions == len(questions) == scores.exact_match["all"].n
    heldout = [shard for shard in corpus.manifest.shards if shard.split == "heldout"]
    assert scores.num_images == sum(shard.num_images for shard in heldout)
    assert scores.release_sha256 == release_sha256(release.folder)
    assert scores.manifest_sha256 == corpus.manifest.sha256
    changed = sum(row["prediction"] != row["blind_prediction"] for row in predictions.to_pylist())
    assert changed > len(questions) // 4


def test_one_process_predicts_the_same_as_two(scored, release, corpus, monkeypatch):
    def run_here(commands, **_):
        for module, *arguments in commands:
            assert module == "diptych.evaluate.generate"
            generate.main(arguments)

    monkeypatch.setattr("diptych.evaluate.score.run_modules", run_here)
    params = EvaluateParams(num_processes=1, batch=8, max_new_tokens=4, device="cpu")
    _, predictions = score(
        release.folder, release.parity, corpus.manifest, corpus.shards, corpus.buckets, params
    )
    assert predictions.equals(scored[1])


def test_the_model_card_is_filled_and_the_releases_identity_stays(scored, release):
    scores, _ = scored
    card = (release.folder / "README.md").read_text()
    section = read_score_section(card)
    assert f"| all | {scores.exact_match['all'].value:.3f} (" in section
    assert "Not scored yet" not in card
    assert card.startswith("# Card")
    assert card.rstrip().endswith("## Data")
    assert scores.release_sha256 == release.parity.release_sha256


def test_a_release_without_its_own_proof_is_not_scored(release, corpus):
    params = EvaluateParams()
    other = release.parity.model_copy(update={"release_sha256": "f" * 64})
    with pytest.raises(ParityError, match="is not proven: the proof is of ffffffffffff"):
        score(release.folder, other, corpus.manifest, corpus.shards, corpus.buckets, params)
    failed = release.parity.model_copy(update={"passed": False})
    with pytest.raises(ParityError, match="and failed"):
        score(release.folder, failed, corpus.manifest, corpus.shards, corpus.buckets, params)


def test_nothing_held_out_means_nothing_measured(release, corpus):
    train_only = Manifest(
        shards=tuple(shard for shard in corpus.manifest.shards if shard.split == "train"),
        quarantined={},
    )
    scores, predictions = score(
        release.folder, release.parity, train_only, corpus.shards, corpus.buckets, EvaluateParams()
    )
    assert (scores.num_questions, scores.exact_match, predictions.num_rows) == (0, {}, 0)
    assert "no sample was held out" in describe(scores, parity=release.parity)


def test_scoring_starts_without_torch():
    code = (
        "import sys, diptych.evaluate.score;"
        "sys.exit(' '.join({'torch', 'transformers', 'kedro'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_visible_devices_are_counted_without_torch(monkeypatch):
    for value, expected in (("", 0), ("-1", 0), ("0", 1), ("2,3", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert count_gpus() == expected


def test_tables_keep_both_answers():
    import dataclasses

    from tests.evaluate.test_tasks import question

    asked = dataclasses.replace(question(5, "Read it."), answer="Seven")
    (row,) = tabulate([asked], answers=[("seven ", "8")]).to_pylist()
    assert (row["prediction"], row["blind_prediction"]) == ("seven ", "8")
    assert (row["correct"], row["blind_correct"], row["question"]) == (True, False, "Read it.")
