import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diptych.core.errors import FormatError
from diptych.plan.workload import read_workload


def test_training_split_is_read_over_all_shards(sample_costs):
    workload = read_workload(sample_costs)
    assert workload.num_tokens.tolist() == [30, 50, 10]
    assert workload.num_patches.tolist() == [48, 96, 0]


def test_heaviest_pads_to_the_longest_and_takes_the_most_patched(sample_costs):
    counts = read_workload(sample_costs).heaviest(2)
    assert (counts.num_tokens, counts.squared_tokens) == (100, 5000)
    assert (counts.num_patches, counts.squared_patches) == (144, 96**2 + 48**2)
    assert counts.num_head_tokens == 10


def test_heaviest_of_more_rows_than_samples_repeats_them(sample_costs):
    assert read_workload(sample_costs).heaviest(6).num_patches == 2 * (96 + 48)


def test_mean_rows_carry_no_padding(sample_costs):
    counts = read_workload(sample_costs).mean(6)
    assert counts.num_tokens == 2 * (30 + 50 + 10)
    assert counts.squared_tokens == 2 * (900 + 2500 + 100)
    # Two images of 48 patches each in the second sample.
    assert counts.squared_patches == 2 * (48**2 + 2 * 48**2)


def test_split_without_samples_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"no sample costs of the split 'train'.*prepare"):
        read_workload(tmp_path)


def test_file_without_a_column_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    pq.write_table(pa.table({"num_tokens": [1]}), tmp_path / "train" / "a-000000.parquet")
    with pytest.raises(FormatError, match=r"a-000000\.parquet have no column num_label_tokens"):
        read_workload(tmp_path)
