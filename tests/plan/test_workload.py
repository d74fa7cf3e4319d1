import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diptych.core.errors import FormatError
from diptych.core.records import ScheduleSpec
from diptych.plan.workload import read_workload

BUCKET = ScheduleSpec(max_row_tokens=1024)
PACK = ScheduleSpec(mode="pack", max_row_tokens=60)


def test_training_split_is_read_over_all_shards(sample_costs):
    workload = read_workload(sample_costs)
    assert workload.num_samples == 3
    assert workload.num_tokens == 30 + 50 + 10
    assert workload.max_tokens == 50
    assert workload.largest_patches.tolist() == [96, 48, 0]


def test_samples_that_no_batch_takes_do_not_count(sample_costs):
    path = sample_costs / "train" / "starter-000000.parquet"
    table = pq.read_table(path)
    status = pa.array(["ok", "no_label"])
    pq.write_table(table.set_column(table.column_names.index("status"), "status", status), path)
    workload = read_workload(sample_costs)
    assert (workload.num_samples, workload.num_tokens, workload.max_tokens) == (2, 40, 30)


def test_heaviest_pads_to_the_longest_and_takes_the_most_patched(sample_costs):
    counts = read_workload(sample_costs).heaviest(2, schedule=BUCKET)
    assert (counts.num_tokens, counts.squared_tokens) == (100, 5000)
    assert (counts.num_patches, counts.squared_patches) == (144, 96**2 + 48**2)
    assert counts.num_head_tokens == 10


def test_heaviest_of_more_rows_than_samples_repeats_them(sample_costs):
    assert read_workload(sample_costs).heaviest(6, schedule=BUCKET).num_patches == 2 * (96 + 48)


def test_heaviest_keeps_the_rows_budgets(sample_costs):
    spec = ScheduleSpec(max_row_tokens=40, max_row_patches=60, over_long="leave_out")
    counts = read_workload(sample_costs).heaviest(2, schedule=spec)
    assert (counts.num_tokens, counts.num_patches) == (80, 60 + 48)


def test_heaviest_packed_rows_are_full_of_the_densest(sample_costs):
    counts = read_workload(sample_costs).heaviest(2, schedule=PACK)
    assert (counts.num_tokens, counts.squared_tokens) == (2 * 60, 2 * 3600)
    # 96 patches on 50 tokens are the densest, 3 labels on 10; no image has more than 96 patches.
    assert counts.num_patches == 2 * 116
    assert counts.squared_patches == 2 * 116 * 96
    assert counts.num_head_tokens == 2 * 18
    spec = PACK.model_copy(update={"max_row_patches": 100})
    counts = read_workload(sample_costs).heaviest(2, schedule=spec)
    assert (counts.num_patches, counts.squared_patches) == (200, 200 * 96)


def test_mean_rows_carry_no_padding(sample_costs):
    counts = read_workload(sample_costs).mean(6, schedule=BUCKET)
    assert counts.num_tokens == 2 * (30 + 50 + 10)
    assert counts.squared_tokens == 2 * (900 + 2500 + 100)
    # Two images of 48 patches each in the second sample.
    assert counts.squared_patches == 2 * (48**2 + 2 * 48**2)


def test_mean_packed_rows_are_full(sample_costs):
    # All samples fill one row and a half: 90 tokens.
    counts = read_workload(sample_costs).mean(3, schedule=PACK)
    assert (counts.num_tokens, counts.squared_tokens) == (180, 3 * 3600)
    assert (counts.num_patches, counts.num_head_tokens) == (2 * 144, 2 * 13)
    # With 48 patches a row, patches are scarcer: three rows.
    spec = PACK.model_copy(update={"max_row_patches": 48})
    assert read_workload(sample_costs).mean(3, schedule=spec).num_patches == 144


def test_split_without_samples_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"no sample costs of the split 'train'.*prepare"):
        read_workload(tmp_path)


def test_file_without_a_column_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    pq.write_table(pa.table({"num_tokens": [1]}), tmp_path / "train" / "a-000000.parquet")
    with pytest.raises(FormatError, match=r"a-000000\.parquet have no column num_label_tokens"):
        read_workload(tmp_path)
