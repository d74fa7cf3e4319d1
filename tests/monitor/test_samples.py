from __future__ import annotations

import json

from diptych.monitor import tails
from diptych.monitor.samples import newest_samples, read_samples


def write(folder, node, times):
    folder.mkdir(exist_ok=True)
    made = [{"time_s": time_s, "node": node, "attempt": 0, "num_cores": 8} for time_s in times]
    text = "".join(json.dumps(each) + "\n" for each in made)
    (folder / f"{node}.jsonl").write_text(text)


def times_of(samples):
    return [(each.node, each.time_s) for each in samples]


def test_a_time_s_samples_of_all_nodes_are_read_in_order(tmp_path):
    write(tmp_path, "a", range(0, 5000, 2))
    write(tmp_path, "b", range(1, 5000, 2))
    found = read_samples(tmp_path, since_s=4000, until_s=4003)
    assert times_of(found) == [("a", 4000), ("b", 4001), ("a", 4002), ("b", 4003)]
    assert len(read_samples(tmp_path, since_s=0)) == 5000
    assert read_samples(tmp_path / "none", since_s=0) == []


def test_no_more_is_read_than_asked_for(tmp_path, monkeypatch):
    write(tmp_path, "a", range(200_000))
    num_read = []
    original = tails.last_lines
    monkeypatch.setattr(
        "diptych.monitor.samples.last_lines",
        lambda path, *, most_bytes: (
            num_read.append(most_bytes) or original(path, most_bytes=most_bytes)
        ),
    )
    assert len(read_samples(tmp_path, since_s=199_990)) == 10
    assert sum(num_read) < 100_000
    cut = read_samples(tmp_path, since_s=0, most_bytes=50_000)
    assert 0 < len(cut) < 2000
    assert cut[-1].time_s == 199_999


def test_damaged_lines_are_left_out(tmp_path):
    write(tmp_path, "a", [1, 2, 3])
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xff\xfe{}\n[1]\n" + path.read_bytes() + b'{"time_s": 4, "node"')
    assert [each.time_s for each in read_samples(tmp_path, since_s=0)] == [1, 2, 3]


def test_the_newest_of_each_node_is_taken_unless_it_is_old(tmp_path):
    write(tmp_path, "a", [90, 99])
    write(tmp_path, "b", [80, 81])
    newest = newest_samples(tmp_path, now_s=100, within_s=10)
    assert {node: each.time_s for node, each in newest.items()} == {"a": 99}
