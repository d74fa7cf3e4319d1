"""Preparation on Ray: the same bytes as with processes of this machine, whoever dies."""

from __future__ import annotations

import os
import signal
from hashlib import sha256
from pathlib import Path

import pytest

from diptych.core.errors import DataError, RunError
from diptych.data.executor import LOCAL, ExecutorParams, opened_pool
from diptych.data.indexing.index import IndexParams, index
from diptych.data.shards.shard import ShardParams, shard
from diptych.data.sources import SourceParams, gather

pytestmark = [pytest.mark.ray]


def _files(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _prepare(raw: Path, out: Path, executor: ExecutorParams):
    raw_samples = gather({"digits": SourceParams(kind="starter", path=str(raw))})
    params = IndexParams(num_processes=2)
    sample_index, quarantine = index(raw_samples, params, str(out / "index"), executor)
    _, manifest = shard(
        sample_index,
        raw_samples,
        quarantine,
        ShardParams(max_samples=16, num_processes=2),
        str(out / "shards"),
        executor,
    )
    return manifest


def test_a_cluster_makes_the_same_bytes_as_local_processes(corpus, tmp_path, two_nodes):
    local = _prepare(corpus.raw, tmp_path / "local", LOCAL)
    on_ray = ExecutorParams(kind="ray", address=two_nodes)
    assert _prepare(corpus.raw, tmp_path / "ray", on_ray) == local
    files = _files(tmp_path / "local")
    assert _files(tmp_path / "ray") == files
    # Two splits, 80 and 24 samples in shards of 16: 5 + 2, each a tar with its index.
    assert len([name for name in files if name.endswith(".tar")]) == 7
    assert any(name.startswith("index/") for name in files)


def where(path: str) -> tuple[int, str]:
    return os.getpid(), os.getcwd()


def die_once(path: str) -> int:
    marker = Path(path)
    if marker.name.startswith("1") and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return int(marker.name)


def die(path: str) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def refuse(path: str) -> int:
    raise DataError("The sample is torn", allowed="Whole ones", cure="Mend it")


def test_tasks_run_elsewhere_and_a_killed_one_is_done_again(tmp_path, two_nodes, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    on_ray = ExecutorParams(kind="ray", address=two_nodes)
    with opened_pool(on_ray, num_processes=None, is_small=True) as pool:
        found = list(pool(where, ["", ""]))
        assert os.getpid() not in [pid for pid, _ in found]
        assert [folder for _, folder in found] == [str(tmp_path)] * 2
        assert list(pool(die_once, [str(tmp_path / str(n)) for n in range(4)])) == [0, 1, 2, 3]
        assert (tmp_path / "1").exists()
        with pytest.raises(DataError) as error:
            list(pool(refuse, ["a"]))
        assert str(error.value) == "The sample is torn. Whole ones. Mend it."
        assert error.value.cure == "Mend it"
        with pytest.raises(RunError, match="A process that prepared data died"):
            list(pool(die, ["a"]))


def test_a_local_cluster_ends_with_the_work(ray_variables, monkeypatch):
    import psutil

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def below():
        return {child.pid for child in psutil.Process().children(recursive=True)}

    before = below()
    with opened_pool(ExecutorParams(kind="ray"), num_processes=1, is_small=True) as pool:
        assert [pid for pid, _ in pool(where, [""])] != [os.getpid()]
        assert len(below() - before) >= 4
    assert below() == before
