"""The benchmark `zero_vs_fsdp`: its arithmetic, and its rows on one GPU (`make gpu-check`)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LAYOUTS = [
    "ddp",
    "fsdp2, gathered once",
    "fsdp2, gathered twice",
    "fsdp2, states on the host",
    "zero 1",
    "zero 2",
    "zero 3",
    "zero 2, optimizer on the host",
]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import zero_vs_fsdp

    return zero_vs_fsdp


def test_the_largest_figure_of_all_ranks_counts(bench: ModuleType) -> None:
    one = bench.Found(1, 20, 3, 40, 5.0, 0.5, [2.0, 1.0])
    other = bench.Found(10, 2, 30, 4, 50.0, 0.4, [2.0, 1.0])
    assert bench.worst([one, other]) == bench.Found(10, 20, 30, 40, 50.0, 0.5, [2.0, 1.0])


def test_losses_are_held_against_ddp_in_fp32_on_as_many_ranks(bench: ModuleType) -> None:
    def row(layout: str, precision: str, num_ranks: int, *losses: float) -> dict:
        names = {"layout": layout, "precision": precision, "num_ranks": num_ranks}
        return {**names, "losses": list(losses)}

    rows = [
        row("ddp", "fp32", 2, 4.0, 2.0),
        row("zero 1", "fp32", 2, 4.0, 2.00001),
        row("zero 1", "bf16", 2, 4.04, 2.0),
        row("ddp", "fp32", 4, 8.0, 4.0),
        row("zero 1", "bf16", 4, 8.0, 4.0),
    ]
    assert bench.check_losses(rows) == pytest.approx({"fp32": 5e-6, "bf16": 1e-2})
    with pytest.raises(AssertionError, match="losses in bf16 differ"):
        bench.check_losses([*rows, row("zero 2", "bf16", 4, 8.0, 4.4)])


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_gpu_follows(name, precision, bench, tmp_path, capsys, one_gpu) -> None:
    found = bench.run_rank(
        layout=bench.make_layout(name, precision=precision, world_size=1, device="cuda")
    )
    with capsys.disabled():
        print(f"\n{name}, {precision}: {found}")
    if "losses" not in one_gpu:
        plain = bench.make_layout("ddp", precision="fp32", world_size=1, device="cuda")
        one_gpu["losses"] = bench.run_rank(layout=plain).losses
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    assert found.losses == pytest.approx(one_gpu["losses"], rel=tolerance)
    assert found.peak_bytes > 0


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory):
    """A world of one, joined over nccl, and over gloo for what lies on the host."""
    import torch
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield {}
    dist.destroy_process_group()
