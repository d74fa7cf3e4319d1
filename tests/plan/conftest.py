import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diptych.core.records import Cluster, Device, ModelShape, ModelSpec, Parameter
from diptych.core.tables import SAMPLE_COSTS
from diptych.model.inspect import inspect
from diptych.shape.qwen3_vl_sizes import complete

STARTER = {
    "text": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "vision": {
        "depth": 4,
        "hidden_size": 128,
        "num_heads": 4,
        "intermediate_size": 384,
        "patch_size": 8,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1],
    },
}


def shape_of_size(num_parameters, *, num_blocks=10):
    """A model of exactly so many parameters in equal blocks, with the starter's activations."""
    per_block, rest = divmod(num_parameters, num_blocks)
    assert rest == 0
    return ModelShape(
        family="qwen3_vl",
        parameters=tuple(
            Parameter(
                name=f"model.language_model.layers.{i}.mlp.up_proj.weight",
                shape=(per_block,),
                dtype="float32",
                tower="language",
                block=f"model.language_model.layers.{i}",
            )
            for i in range(num_blocks)
        ),
        sizes=complete(STARTER),
        tied_parameters={},
    )


def gpu_cluster(name, memory_bytes, *, num_devices, num_nodes=1, **rates):
    return Cluster(
        num_nodes=num_nodes,
        num_devices_per_node=num_devices,
        device=Device(
            kind="cuda",
            name=name,
            memory_bytes=memory_bytes,
            flops_per_s=rates.get("flops_per_s", {}),
            memory_bytes_per_s=rates.get("memory_bytes_per_s"),
        ),
        num_cores_per_node=32,
        host_memory_bytes=500_000_000_000,
        link_bytes_per_s=rates.get("link_bytes_per_s"),
    )


def cpu_cluster(num_cores, *, memory_bytes=16_000_000_000):
    return Cluster(
        num_nodes=1,
        num_devices_per_node=1,
        device=Device(kind="cpu", name="a CPU", memory_bytes=memory_bytes, flops_per_s={}),
        num_cores_per_node=num_cores,
        host_memory_bytes=memory_bytes,
    )


def write_costs(folder, rows, *, split="train", part=0):
    """Rows of (tokens, labels, image tokens, patches, images)."""
    path = folder / split / f"starter-{part:06d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "key": [f"starter/{part}-{i}" for i in range(len(rows))],
            "num_tokens": [row[0] for row in rows],
            "num_label_tokens": [row[1] for row in rows],
            "num_image_tokens": [row[2] for row in rows],
            "num_patches": [row[3] for row in rows],
            "num_images": [row[4] for row in rows],
            "area_px": [row[3] * 64 for row in rows],
            "aspect": [1.0] * len(rows),
            "status": ["ok"] * len(rows),
        },
        schema=SAMPLE_COSTS,
    )
    pq.write_table(table, path)


@pytest.fixture(scope="session")
def starter_shape():
    return inspect(ModelSpec(sizes=STARTER))


@pytest.fixture
def sample_costs(tmp_path):
    folder = tmp_path / "sample_costs"
    write_costs(folder, [(30, 4, 12, 48, 1), (50, 6, 24, 96, 2)])
    write_costs(folder, [(10, 3, 0, 0, 0)], part=1)
    write_costs(folder, [(999, 999, 0, 9999, 1)], split="heldout")
    return folder


@pytest.fixture
def model_of_size():
    return shape_of_size


@pytest.fixture
def gpus():
    return gpu_cluster


@pytest.fixture
def cpus():
    return cpu_cluster


@pytest.fixture
def write_sample_costs():
    return write_costs
