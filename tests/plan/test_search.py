import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.core.errors import LayoutError
from diptych.core.records import ScheduleSpec
from diptych.plan.search import LayoutParams, search

GB = 1_000_000_000
H100 = {
    "flops_per_s": {"bf16": 989e12, "fp32": 67e12},
    "memory_bytes_per_s": 3.35e12,
    "link_bytes_per_s": 450e9,
}


@pytest.mark.parametrize(
    ("num_cores", "world_size", "micro_batch"), [(1, 1, 32), (2, 2, 16), (4, 4, 8), (64, 4, 8)]
)
def test_cpu_gets_a_rank_a_core(
    starter_shape, cpus, sample_costs, num_cores, world_size, micro_batch
):
    plan = search(starter_shape, cpus(num_cores), sample_costs, ScheduleSpec(), LayoutParams())
    assert plan.best.engine == "ddp"
    assert plan.best.world_size == world_size
    assert plan.best.micro_batch == micro_batch
    assert (plan.best.device, plan.best.precision) == ("cpu", "fp32")
    assert plan.predictions[0].step_s is None
    assert plan.predictions[0].refused is None


def test_unbuilt_axes_are_refused_by_name(starter_shape, cpus, sample_costs):
    plan = search(starter_shape, cpus(2), sample_costs, ScheduleSpec(), LayoutParams())
    reasons = {each.refused for each in plan.predictions if each.layout.tp > 1}
    assert reasons == {"tensor parallelism (tp) is not built yet"}
    refused = [each.refused is not None for each in plan.predictions]
    assert refused == sorted(refused)


def test_gpus_get_bf16_and_all_devices(starter_shape, gpus, sample_costs):
    cluster = gpus("H100", 80 * GB, num_devices=4, **H100)
    plan = search(starter_shape, cluster, sample_costs, ScheduleSpec(), LayoutParams())
    best = plan.predictions[0]
    assert (best.layout.device, best.layout.precision) == ("cuda", "bf16")
    assert (best.layout.engine, best.layout.dp) == ("ddp", 4)
    assert best.step_s is not None
    assert best.step_s > 0


def test_gpu_without_bf16_gets_fp32(starter_shape, gpus, sample_costs):
    cluster = gpus("V100", 16 * GB, num_devices=1, flops_per_s={"fp32": 15.7e12})
    plan = search(starter_shape, cluster, sample_costs, ScheduleSpec(), LayoutParams())
    assert plan.best.precision == "fp32"


def test_seven_billion_shard_where_copies_do_not_fit(model_of_size, gpus, sample_costs):
    """112 GB of states a GPU replicated, 14 GB over 8."""
    cluster = gpus("H100", 80 * GB, num_devices=8, **H100)
    plan = search(model_of_size(7 * GB), cluster, sample_costs, ScheduleSpec(), LayoutParams())
    assert (plan.best.engine, plan.best.shard) == ("fsdp2", 8)
    # And AdamW's counters of ten tensors.
    assert plan.predictions[0].held_bytes == 14 * GB + 40
    copies = [each for each in plan.predictions if each.layout.dp == 8]
    assert copies
    assert {each.held_bytes for each in copies} == {112 * GB + 40}
    assert all(each.refused and "67.1 GiB may be used" in each.refused for each in copies)


def test_thirteen_billion_on_four_of_40_gb_is_refused(model_of_size, gpus, sample_costs):
    """52 GB of states a GPU even when sharded."""
    cluster = gpus("A100", 40 * GB, num_devices=4)
    with pytest.raises(LayoutError, match=r"nearest is fsdp2 on 4 rank.*needs 5\d\.\d GiB"):
        search(model_of_size(13 * GB), cluster, sample_costs, ScheduleSpec(), LayoutParams())


def test_ranks_of_a_cpu_share_its_memory(starter_shape, cpus, sample_costs):
    """A rank costs 0.85 GB before it trains anything: two fit into 90% of 2.5 GB, three do not."""
    cluster = cpus(4, memory_bytes=2_500_000_000)
    plan = search(
        starter_shape, cluster, sample_costs, ScheduleSpec(group=1), LayoutParams(engine="ddp")
    )
    assert plan.best.world_size == 2
    assert all("3 ranks x" in each.refused for each in plan.predictions if each.layout.dp == 3)


def test_memory_bounds_the_micro_batch(starter_shape, gpus, tmp_path, write_sample_costs):
    """32 rows of 20,000 tokens do not fit into 8 GB at once; a group of 8 has to be cut too."""
    write_sample_costs(tmp_path, [(20_000, 100, 0, 0, 0)] * 4)
    cluster = gpus("small", 8 * GB, num_devices=1)
    schedule = ScheduleSpec(max_row_tokens=20_000)
    plan = search(starter_shape, cluster, tmp_path, schedule, LayoutParams())
    assert plan.best.micro_batch in (1, 2, 4)
    assert {8, 16, 32} <= {p.layout.micro_batch for p in plan.predictions if p.refused}


def test_packed_rows_need_no_groups(starter_shape, cpus, sample_costs):
    schedule = ScheduleSpec(mode="pack", global_batch=6, group=4)
    plan = search(starter_shape, cpus(1), sample_costs, schedule, LayoutParams(micro_batch=3))
    assert plan.best.micro_batch == 3
    sizes = search(starter_shape, cpus(1), sample_costs, schedule, LayoutParams()).predictions
    assert {each.layout.micro_batch for each in sizes} == {1, 2, 4, 6}


def test_micro_batch_that_splits_groups_is_refused(starter_shape, cpus, sample_costs):
    params = LayoutParams(micro_batch=3)
    with pytest.raises(LayoutError, match=r"3 rows splits groups of 8.*must divide"):
        search(starter_shape, cpus(2), sample_costs, ScheduleSpec(), params)


def test_explicit_choices_are_kept(starter_shape, cpus, sample_costs):
    params = LayoutParams(engine="fsdp2", num_processes=2, micro_batch=4, precision="bf16")
    plan = search(starter_shape, cpus(1), sample_costs, ScheduleSpec(), params)
    best = plan.best
    assert (best.engine, best.shard, best.micro_batch) == ("fsdp2", 2, 4)
    assert (best.precision, best.grad_sync) == ("bf16", "last")
    assert plan.asked == (
        "plan.layout.engine fsdp2",
        "plan.layout.precision bf16",
        "plan.layout.num_processes 2",
        "plan.layout.micro_batch 4",
    )
    free = search(starter_shape, cpus(1), sample_costs, ScheduleSpec(), LayoutParams())
    assert free.asked == ()


def test_gradients_that_do_not_fit_whole_are_reduced_every_time(model_of_size, gpus, sample_costs):
    """8 B over 8: 16 GB of states, but 32 GB of whole gradients that wait for the last one."""
    cluster = gpus("L40S", 48 * GB, num_devices=8)
    params = LayoutParams(micro_batch=1)
    plan = search(model_of_size(8 * GB), cluster, sample_costs, ScheduleSpec(), params)
    assert (plan.best.engine, plan.best.grad_sync) == ("fsdp2", "every")


def test_nodes_get_copies_of_shard_groups(model_of_size, gpus, sample_costs):
    cluster = gpus("H100", 80 * GB, num_devices=8, num_nodes=2, **H100)
    params = LayoutParams(num_nodes=2)
    plan = search(model_of_size(7 * GB), cluster, sample_costs, ScheduleSpec(), params)
    assert plan.best.world_size == 16
    assert {(p.layout.dp, p.layout.shard) for p in plan.predictions if not p.refused} == {
        (2, 8),
        (1, 16),
    }


def test_gpus_can_be_left_aside(starter_shape, gpus, sample_costs):
    cluster = gpus("H100", 80 * GB, num_devices=8, **H100)
    plan = search(starter_shape, cluster, sample_costs, ScheduleSpec(), LayoutParams(device="cpu"))
    assert plan.best.device == "cpu"
    assert plan.cluster.device.memory_bytes == cluster.host_memory_bytes


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"device": "cuda"}, "'cuda', and the cluster has no GPU"),
        ({"num_nodes": 2}, "num_nodes is 2. The cluster has 1"),
    ],
)
def test_what_is_not_there_is_refused(starter_shape, cpus, sample_costs, params, message):
    with pytest.raises(LayoutError, match=message):
        search(starter_shape, cpus(2), sample_costs, ScheduleSpec(), LayoutParams(**params))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"num_processes": 9}, "num_processes is 9. One rank a GPU"),
        ({"num_processes": 3, "num_nodes": 2}, "A multiple of num_nodes, 2"),
    ],
)
def test_process_counts_that_cannot_be_are_refused(
    starter_shape, gpus, sample_costs, params, message
):
    cluster = gpus("H100", 80 * GB, num_devices=4, num_nodes=2, **H100)
    with pytest.raises(LayoutError, match=message):
        search(starter_shape, cluster, sample_costs, ScheduleSpec(), LayoutParams(**params))


def test_more_ranks_than_rows_are_refused(starter_shape, cpus, sample_costs):
    schedule = ScheduleSpec(global_batch=2, group=2)
    with pytest.raises(LayoutError, match="3 ranks share a global batch of 2"):
        search(starter_shape, cpus(4), sample_costs, schedule, LayoutParams(num_processes=3))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    groups=st.integers(1, 12),
    group=st.integers(1, 9),
    num_cores=st.integers(1, 5),
)
def test_every_plan_covers_the_batch(starter_shape, cpus, sample_costs, groups, group, num_cores):
    schedule = ScheduleSpec(global_batch=groups * group, group=group)
    plan = search(starter_shape, cpus(num_cores), sample_costs, schedule, LayoutParams())
    best = plan.best
    assert group % best.micro_batch == 0 or best.micro_batch % group == 0
    assert best.world_size <= min(num_cores, 4, schedule.global_batch)
    assert best.micro_batch * best.world_size < schedule.global_batch + group * best.world_size
    assert plan == search(starter_shape, cpus(num_cores), sample_costs, schedule, LayoutParams())


def test_a_micro_batch_larger_than_the_batch_is_refused(starter_shape, cpus, sample_costs):
    schedule, params = ScheduleSpec(global_batch=32), LayoutParams(micro_batch=64)
    with pytest.raises(LayoutError, match="64 rows is larger than the global batch of 32; lower"):
        search(starter_shape, cpus(1), sample_costs, schedule, params)


def test_offload_without_room_is_refused(model_of_size, gpus, sample_costs):
    """13 B over 4: 52 GB of states a rank do not fit a GPU of 40 GB, four times that not 200 GB."""
    params = LayoutParams(engine="fsdp2", fsdp={"offload": True}, replicas=1)

    def plan(host_gb):
        cluster = gpus("A100", 40 * GB, num_devices=4, flops_per_s={"bf16": 312e12})
        cluster = cluster.model_copy(update={"host_memory_bytes": host_gb * GB})
        return search(model_of_size(13 * GB), cluster, sample_costs, ScheduleSpec(), params)

    best = plan(256).predictions[0]
    assert best.host_bytes == best.held_bytes == 52 * GB + 40
    assert best.peak_bytes < 36 * GB
    with pytest.raises(LayoutError, match=r"offloads 4 ranks x 49\.2 GiB to a node's memory"):
        plan(200)


def test_zero_is_planned_where_it_is_asked_for(starter_shape, gpus, sample_costs):
    cluster = gpus("H100", 80 * GB, num_devices=4, **H100)
    auto = search(starter_shape, cluster, sample_costs, ScheduleSpec(), LayoutParams())
    assert {each.layout.engine for each in auto.predictions} == {"ddp", "fsdp2"}
    params = LayoutParams(engine="zero", micro_batch=8)
    asked = search(starter_shape, cluster, sample_costs, ScheduleSpec(), params)
    assert [(each.layout.engine, each.layout.shard) for each in asked.predictions] == [("zero", 4)]
