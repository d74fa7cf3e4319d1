"""A raw DeepSpeed configuration, read as our settings: a dictionary in, an `Import` out.

Nothing of it is run as it is. Every key becomes a setting of ours, or is left out with the reason;
a key that DeepSpeed does not have is refused. Knows no file and no Kedro.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diptych.core.errors import ConfigError, nearest


@dataclass(frozen=True)
class Taken:
    """A key of theirs and the setting that it became; `theirs` is a path with dots."""

    theirs: str
    ours: str
    value: Any


@dataclass(frozen=True)
class Left:
    """A key of theirs that became no setting, and why."""

    theirs: str
    why: str


@dataclass(frozen=True)
class Import:
    """What a DeepSpeed configuration means here."""

    taken: tuple[Taken, ...]
    left: tuple[Left, ...]

    def overrides(self, present: Mapping[str, Any]) -> list[tuple[Taken, Any]]:
        """List what would change settings that are there, each with the value it has now.

        Args:
            present: the parameters as nested dictionaries (`plan`, `train`).
        """
        pairs = [(each, _look_up(present, path=each.ours)) for each in self.taken]
        return [(each, now) for each, now in pairs if now != each.value]

    def parameters(self) -> dict[str, Any]:
        """Return the settings as nested dictionaries, for YAML."""
        found: dict[str, Any] = {}
        for each in self.taken:
            *parents, last = each.ours.split(".")
            part = found
            for name in parents:
                part = part.setdefault(name, {})
            part[last] = each.value
        return found


Reader = Callable[[str, Any], Iterator[Taken | Left]]
"""Reads one key: its path and its value in, what became of it out."""

_LAYOUT = "plan.layout"
_ZERO = f"{_LAYOUT}.zero"
_SCALE = f"{_LAYOUT}.mixed_precision.loss_scale"
_ADAM = "train.optimizer"
_AUTO = "'auto' leaves it to the planner"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_DEVICES = {"none": "device", "cpu": "cpu", "nvme": "nvme"}

_LEFT = {
    "scheduler": "the learning rate's course is train.optimizer (warmup_steps, final_lr_fraction)",
    "activation_checkpointing": "it is plan.layout.memory.recompute",
    "steps_per_print": "the step log has every step; train.log_every_steps is for the console",
    "wall_clock_breakdown": "every step's times are in the step log",
    "zero_allow_untested_optimizer": "always so",
    "zero_force_ds_cpu_optimizer": "plan.layout.zero.optimizer.adam chooses",
    "gradient_predivide_factor": "the loss is summed over the global batch's label tokens",
    "prescale_gradients": "the loss is summed over the global batch's label tokens",
    "dump_state": "the run's folder holds its settings",
    "memory_breakdown": "bench state_bytes and the plan show memory",
    "tensorboard": "not built yet",
    "wandb": "not built yet",
    "csv_monitor": "the step log is a file of JSON lines",
    "comet": "not built yet",
    "flops_profiler": "not built yet",
    "comms_logger": "bench comm_bytes counts what is sent",
    "data_efficiency": "the schedule forms the batches",
    "curriculum_learning": "the schedule forms the batches",
    "dataloader_drop_last": "the schedule forms the batches",
    "checkpoint": "checkpoints are ours, by full parameter name",
    "elasticity": "every global batch is the same for any number of ranks",
    "autotuning": "the planner chooses",
    "aio": "DeepSpeed's defaults are used",
    "amp": "it is plan.layout.precision",
    "sparse_gradients": "embeddings have dense gradients",
    "seed": "it is train.seed",
    "torch_autocast": "it is plan.layout.precision",
    "data_types": "gradients add up in fp32",
}
_LEFT_OF_ZERO = {
    "allgather_partitions": "always so",
    "reduce_scatter": "always so",
    "round_robin_gradients": "it only spreads copies to the host; not built",
    "sub_group_size": "DeepSpeed's default is used",
    "stage3_gather_16bit_weights_on_model_save": "checkpoints hold fp32 weights, sharded",
    "stage3_gather_fp16_weights_on_model_save": "checkpoints hold fp32 weights, sharded",
    "ignore_unused_parameters": "always so",
    "elastic_checkpoint": "any layout reads any checkpoint",
    "load_from_fp32_weights": "always so",
    "legacy_stage1": "not built",
    "zero_hpz_partition_size": "secondary partitions are not built",
    "zero_quantized_weights": "ZeRO++ changes the mathematics; not built",
    "zero_quantized_gradients": "ZeRO++ changes the mathematics; not built",
    "zero_quantized_nontrainable_weights": "ZeRO++ changes the mathematics; not built",
    "mics_shard_size": "copies of shards are plan.layout.replicas, with engine fsdp2",
    "mics_hierarchical_params_gather": "copies of shards are plan.layout.replicas, with fsdp2",
    "memory_efficient_linear": "it would replace torch's linear for the whole process",
}


def read_deepspeed(config: Any) -> Import:
    """Read a DeepSpeed configuration.

    Args:
        config: what its JSON file holds.

    Raises:
        ConfigError: it is no dictionary, has a key that DeepSpeed does not know, a value that
            cannot work, or batch sizes that contradict each other.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"A DeepSpeed configuration is a JSON object, and this is a {type(config).__name__}"
        )
    found = [
        Taken("(the file)", f"{_LAYOUT}.engine", "zero"),
        *_walk(config, readers=_READERS, path=""),
        *_read_batch({name: config[name] for name in _BATCH if config.get(name, "auto") != "auto"}),
    ]
    return Import(
        taken=tuple(each for each in found if isinstance(each, Taken)),
        left=tuple(each for each in found if isinstance(each, Left)),
    )


def _walk(
    section: Mapping[str, Any], *, readers: Mapping[str, Reader], path: str
) -> Iterator[Taken | Left]:
    """Read every key of a section by its reader.

    Raises:
        ConfigError: a key has none.
    """
    for name, value in section.items():
        full = f"{path}.{name}" if path else name
        if value == "auto":
            yield Left(full, _AUTO)
        elif name in readers:
            yield from readers[name](full, value)
        else:
            raise ConfigError(
                f"DeepSpeed has no setting '{full}', or none that is known here",
                cure=nearest(name, allowed=readers),
            )


def _read_batch(batch: Mapping[str, Any]) -> Iterator[Taken]:
    whole, micro, steps = (_count(name, batch[name]) if name in batch else None for name in _BATCH)
    if whole is not None and micro and steps:
        if whole % (micro * steps):
            raise ConfigError(
                f"train_batch_size is {whole}, and train_micro_batch_size_per_gpu {micro} times "
                f"gradient_accumulation_steps {steps} is {micro * steps}",
                allowed="train_batch_size = micro-batch x accumulation steps x ranks",
                cure=f"Make {whole} a multiple of {micro * steps}",
            )
        yield Taken(" / ".join(_BATCH), f"{_LAYOUT}.num_processes", whole // (micro * steps))
    if whole is not None:
        yield Taken(_BATCH[0], "train.schedule.global_batch", whole)
    if micro is not None:
        yield Taken(_BATCH[1], f"{_LAYOUT}.micro_batch", micro)


def _take(ours: str, read: Callable[[str, Any], Any]) -> Reader:
    """Make a reader of a key that is a setting of ours."""

    def reader(path: str, value: Any) -> Iterator[Taken | Left]:
        yield Taken(path, ours, read(path, value))

    return reader


def _leave(why: str) -> Reader:
    """Make a reader of a key that is none."""

    def reader(path: str, value: Any) -> Iterator[Taken | Left]:
        yield Left(path, why)

    return reader


def _nest(readers: Mapping[str, Reader]) -> Reader:
    """Make a reader of a section."""

    def reader(path: str, value: Any) -> Iterator[Taken | Left]:
        yield from _walk(_section(path, value), readers=readers, path=path)

    return reader


def _half(readers: Mapping[str, Reader]) -> Reader:
    """Make a reader of a dtype's section, which counts where it is enabled."""

    def reader(path: str, value: Any) -> Iterator[Taken | Left]:
        section = _section(path, value)
        if section.get("enabled"):
            yield from _walk(section, readers=readers, path=path)
        else:
            yield from (Left(f"{path}.{name}", "this dtype is off") for name in section)

    return reader


def _none(path: str, value: Any) -> Iterator[Taken | Left]:
    """Read a key whose parts are read together, elsewhere."""
    yield from ()


def _number(path: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{path} is {value!r}", allowed="A number, or 'auto'")
    return value


def _count(path: str, value: Any) -> int:
    """Read a whole number; DeepSpeed's own examples write 5e8."""
    number = _number(path, value)
    if number != int(number) or number < 0:
        raise ConfigError(f"{path} is {value!r}", allowed="A whole number, or 'auto'")
    return int(number)


def _flag(path: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{path} is {value!r}", allowed="true or false, or 'auto'")
    return value


def _section(path: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} is {value!r}", allowed="An object of settings")
    return value


def _stage(path: str, value: Any) -> int:
    if value not in (1, 2, 3):
        raise ConfigError(
            f"{path} is {value}",
            allowed="1, 2 or 3",
            cure="Stage 0 is engine ddp: set plan.layout.engine to ddp instead",
        )
    return value


def _device(path: str, value: Any) -> str:
    if value not in _DEVICES:
        raise ConfigError(f"{path} is {value!r}", allowed=", ".join(_DEVICES))
    return _DEVICES[value]


def _dtype(path: str, value: Any) -> str:
    if value not in ("fp32", "fp16", "bf16"):
        raise ConfigError(f"{path} is {value!r}", allowed="fp32, fp16, bf16")
    return value


def _betas(path: str, value: Any) -> list[float]:
    if not (isinstance(value, list) and len(value) == 2):
        raise ConfigError(f"{path} is {value!r}", allowed="Two numbers below 1")
    return [_number(path, each) for each in value]


def _kind(path: str, value: Any) -> Iterator[Taken | Left]:
    if str(value).lower() not in ("adam", "adamw"):
        raise ConfigError(
            f"{path} is '{value}'",
            allowed="Adam and AdamW, which are trained as AdamW",
            cure="Take the optimizer out and set train.optimizer",
        )
    yield Left(path, "the optimizer is AdamW")


def _offload(ours: str, *, flags: tuple[str, ...], counts: tuple[str, ...]) -> Reader:
    place = f"{_ZERO}.{ours}"
    return _nest(
        {
            "device": _take(f"{place}.to", _device),
            "nvme_path": _take(f"{place}.path", lambda path, value: str(value)),
            **{name: _take(f"{place}.{name}", _flag) for name in flags},
            **{name: _take(f"{place}.{name}", _count) for name in counts},
            **dict.fromkeys(
                ("pipeline", "pipeline_read", "pipeline_write", "ratio", "super_offload"),
                _leave("DeepSpeed's default is used"),
            ),
        }
    )


_READERS: dict[str, Reader] = {
    **{name: _leave(why) for name, why in _LEFT.items()},
    **dict.fromkeys(_BATCH, _none),
    "gradient_clipping": _take(f"{_ADAM}.max_grad_norm", _number),
    "communication_data_type": _take(f"{_LAYOUT}.mixed_precision.reduce", _dtype),
    "optimizer": _nest(
        {
            "type": _kind,
            "params": _nest(
                {
                    "betas": _take(f"{_ADAM}.betas", _betas),
                    **{
                        name: _take(f"{_ADAM}.{name}", _number)
                        for name in ("lr", "eps", "weight_decay")
                    },
                    **dict.fromkeys(
                        ("torch_adam", "adam_w_mode", "bias_correction", "amsgrad", "fused"),
                        _leave("AdamW here has no such choice"),
                    ),
                }
            ),
        }
    ),
    **dict.fromkeys(
        ("bf16", "bfloat16"),
        _half(
            {
                "enabled": _take(f"{_LAYOUT}.precision", lambda path, value: "bf16"),
                **dict.fromkeys(
                    (
                        "check_grad_overflow",
                        "immediate_grad_update",
                        "bf16_master_weights_and_grads",
                    ),
                    _leave("gradients are checked and weights held in fp32 in every dtype"),
                ),
            }
        ),
    ),
    "fp16": _half(
        {
            "enabled": _take(f"{_LAYOUT}.precision", lambda path, value: "fp16"),
            "initial_scale_power": _take(
                f"{_SCALE}.initial", lambda path, value: 2.0 ** _count(path, value)
            ),
            "loss_scale_window": _take(f"{_SCALE}.growth_interval", _count),
            "min_loss_scale": _take(
                f"{_SCALE}.minimum", lambda path, value: float(_number(path, value))
            ),
            "loss_scale": _leave(
                "the loss scale is dynamic; loss_scale.initial is where it begins"
            ),
            "auto_cast": _leave("inputs are always cast"),
            **dict.fromkeys(
                ("hysteresis", "consecutive_hysteresis"),
                _leave("the loss scale shrinks with every step that overflows"),
            ),
        }
    ),
    "zero_optimization": _nest(
        {
            **{name: _leave(why) for name, why in _LEFT_OF_ZERO.items()},
            "stage": _take(f"{_ZERO}.stage", _stage),
            "overlap_comm": _take(f"{_ZERO}.overlap", _flag),
            "contiguous_gradients": _take(f"{_ZERO}.contiguous_gradients", _flag),
            **{
                theirs: _take(f"{_ZERO}.{ours}", _count)
                for theirs, ours in {
                    "reduce_bucket_size": "reduce_bucket_elements",
                    "allgather_bucket_size": "allgather_bucket_elements",
                    "stage3_prefetch_bucket_size": "prefetch_elements",
                    "stage3_param_persistence_threshold": "persistence_threshold_elements",
                    "stage3_max_live_parameters": "max_live_elements",
                    "stage3_max_reuse_distance": "max_reuse_distance_elements",
                }.items()
            },
            "offload_optimizer": _offload(
                "optimizer", flags=("pin_memory", "fast_init"), counts=("buffer_count",)
            ),
            "offload_param": _offload(
                "parameters",
                flags=("pin_memory",),
                counts=("buffer_count", "buffer_size", "max_in_cpu"),
            ),
            **dict.fromkeys(
                ("cpu_offload", "cpu_offload_params", "cpu_offload_use_pin_memory"),
                _leave("a former name: write offload_optimizer and offload_param"),
            ),
        }
    ),
}


def _look_up(present: Mapping[str, Any], *, path: str) -> Any:
    part: Any = present
    for name in path.split("."):
        if not isinstance(part, Mapping) or name not in part:
            return None
        part = part[name]
    return part
