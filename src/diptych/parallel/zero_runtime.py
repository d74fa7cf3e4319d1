"""DeepSpeed as a library: imported quietly, on the process group that is there, undone at the end.

In: a module, an optimizer, a configuration. Out: DeepSpeed's engine. DeepSpeed keeps state in
globals and on modules; what would outlive its engine is kept off or taken back here.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from diptych.core.errors import LayoutError
from diptych.core.records import Layout
from diptych.parallel.mesh import World


def start(
    module: nn.Module,
    *,
    optimizer: Optimizer,
    config: dict[str, Any],
    layout: Layout,
    world: World,
) -> Any:
    """Hand a module to DeepSpeed and return its engine.

    Raises:
        LayoutError: DeepSpeed is not installed, or cannot divide a parameter.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            raise LayoutError(
                f"The parameter {name} is a number, which DeepSpeed cannot divide",
                cure="Use engine ddp, or give it a dimension of one element",
            )
    _prepare(layout, world=world)
    with _quiet():
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, dist_init_required=False
        )
    if layout.zero.stage == 3:
        _save_weights_by_name(module)
    if layout.zero.parameters.to == "nvme":
        _fetch_once(module)
    return engine


def cut_up(
    parameters: Iterator[nn.Parameter],
    *,
    dtype: torch.dtype,
    config: dict[str, Any],
    layout: Layout,
    world: World,
) -> None:
    """Have DeepSpeed (stage 3) share each parameter out over ranks before it asks for the next.

    Raises:
        LayoutError: DeepSpeed is not installed.
    """
    _prepare(layout, world=world)

    class Stream(nn.Module):
        """What DeepSpeed takes for a module; it wants nothing of it but its parameters."""

        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            """Return the stream."""
            return parameters

    with _quiet():
        import deepspeed

        deepspeed.zero.Init(module=Stream(), config_dict_or_path=config, dtype=dtype)


def adam(optimizer: Optimizer, *, layout: Layout) -> Optimizer:
    """Return DeepSpeed's own AdamW for states in the host's memory, where the layout asks for it.

    Raises:
        LayoutError: its kernel cannot be compiled, or the optimizer is another one than AdamW.
    """
    if not isinstance(optimizer, torch.optim.AdamW):
        raise LayoutError(
            f"The optimizer is {type(optimizer).__name__}, and the layout's engine is zero",
            allowed="DeepSpeed lays the weights end to end, which only AdamW can update",
            cure="Set train.optimizer.kind to adamw, or plan.layout.engine to ddp",
        )
    offload = layout.zero.optimizer
    if offload.to == "device" or offload.adam == "torch":
        return optimizer
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    theirs = set(optimizer.defaults) - {"lr", "betas", "eps", "weight_decay"}
    groups = [
        {name: value for name, value in group.items() if name not in theirs}
        for group in optimizer.param_groups
    ]
    try:
        return DeepSpeedCPUAdam(groups, adamw_mode=True)
    except RuntimeError as error:
        raise LayoutError(
            f"DeepSpeed's AdamW for the host's memory cannot be compiled: {error.__cause__}",
            cure="Set plan.layout.zero.optimizer.adam to torch, or install ninja and g++",
        ) from error


def cast_inputs(module: nn.Module, *, dtype: torch.dtype) -> None:
    """Have a module's tensors of floating point come in the dtype of its weights."""

    def cast(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        return tuple(map(lower, args)), {name: lower(value) for name, value in kwargs.items()}

    def lower(value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_real else value

    module.register_forward_pre_hook(cast, with_kwargs=True)


def drop_gradient(engine: Any) -> None:
    """Forget a gradient, as DeepSpeed does with one that is not finite, and where it forgets to.

    In lower precision with an offloaded optimizer, stages 1 and 2 go on adding to such a gradient.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp16_groups"):
        optimizer._pre_step()
        optimizer._partition_all_parameters()
        optimizer._overflow_clean_up(None)
        return
    optimizer.zero_grad()
    if hasattr(optimizer, "averaged_gradients"):
        optimizer.micro_step_id = -1
        for number in optimizer.averaged_gradients:
            optimizer.averaged_gradients[number] = None
            optimizer.all_grad_tensors[number] = None
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            optimizer._offload_accumulated_param_ids.clear()


def forget_interrupted(engine: Any) -> None:
    """Forget the modules whose forward pass was left before its end.

    Recomputing stops where all is there that was asked for; DeepSpeed would list such modules for
    ever, and look through all of them in every forward pass.
    """
    from deepspeed.runtime.zero import parameter_offload

    stack = parameter_offload.FWD_MODULE_STACK
    if engine.module in stack:
        del stack[stack.index(engine.module) + 1 :]


def stop(engine: Any) -> None:
    """Take DeepSpeed's hooks off the module and forget it."""
    from deepspeed.runtime.zero import parameter_offload

    engine.destroy()
    forget_interrupted(engine)
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not engine.module]


def _prepare(layout: Layout, *, world: World) -> None:
    """Import DeepSpeed for the layout's device.

    Raises:
        LayoutError: it is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise LayoutError(
            "The layout's engine is zero, and DeepSpeed is not installed",
            cure="Install it (pip install deepspeed), or use fsdp2",
        )
    os.environ.setdefault("DS_ACCELERATOR", layout.device)
    # Torch elastic sets it; DeepSpeed would look for MPI without it.
    os.environ.setdefault("LOCAL_RANK", str(world.rank))
    with _quiet():
        import deepspeed  # noqa: F401 - its import is what takes long and talks

        _choose_accelerator(layout)
        _spare_work()


def _choose_accelerator(layout: Layout) -> None:
    """Have DeepSpeed use the layout's device, whatever it found when it was imported.

    On a CPU it asks for oneDNN's fp16 kernels, which many lack; torch has its own. And where it is
    told that there is no fp16, it takes fp32 weights for bf16 when it moves them to a disk.
    """
    if layout.device != "cpu":
        return
    from deepspeed import accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Cpu(CPU_Accelerator):
        """A CPU that computes in fp16, in software where it has no instructions for it."""

        def is_fp16_supported(self) -> bool:
            """Return True."""
            return True

    accelerator.set_accelerator(Cpu())


def _spare_work() -> None:
    """Have DeepSpeed leave out what nothing here asks for; it costs seconds, or a minute."""
    import deepspeed
    from deepspeed.runtime import bf16_optimizer, compiler

    # It collects all garbage before it prints how much memory is used.
    bf16_optimizer.see_memory_usage = lambda *args, **options: None
    # Collectives for inference on one host.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Muon: every run imports it to ask whether it is used, and that import loads torch's compiler.
    original = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = original


def _save_weights_by_name(module: nn.Module) -> None:
    """Have linear layers keep the parameter for their backward pass, not a view of gathered bytes.

    The view would keep every layer's whole weight alive after it was released. DeepSpeed's own
    switch for this changes torch's function for the whole process.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    def forward(linear: nn.Linear) -> Any:
        return lambda given: zero3_linear_wrap(given, linear.weight, linear.bias)

    for each in module.modules():
        # A head that returns losses has a forward of its own.
        if type(each) is nn.Linear and "forward" not in vars(each):
            each.forward = forward(each)


def _fetch_once(module: nn.Module) -> None:
    """Have weights read from a disk once when DeepSpeed looks ahead.

    It lists one twice whose forward and backward pass are both near, and then fails.
    """
    swapper = next(each.nvme_swapper for each in module.parameters())  # pyright: ignore[reportAttributeAccessIssue]
    swap_in = swapper.swap_in

    def once(params: list[Any], **options: Any) -> None:
        swap_in(list(dict.fromkeys(params)), **options)

    swapper.swap_in = once


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep DeepSpeed's notes about itself off the console; errors are raised anyhow."""
    extension = logging.getLogger("torch.utils.cpp_extension")
    level = extension.level
    extension.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        extension.setLevel(level)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It calls collectives by names that recent torch has renamed.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
