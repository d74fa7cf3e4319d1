"""Weights from files into a model, tensor by tensor: a model without any in, a filled one out.

`outline` makes the model on the meta device, a `Reading` finds every weight's place in the files,
and once the model is spread over ranks `Reading.fill` allocates what this rank holds and reads that
from the mapped files. What a weight is for is unknown here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec
from diptych.model import adapters
from diptych.model.composition import TowerFiles, find
from diptych.model.names import Match, match
from diptych.model.revision import check_digest, find_folder
from diptych.model.tensor_files import TensorFiles
from diptych.shape.adapters import MAGNITUDE, is_adapter, plain_name

_CHUNK_ELEMENTS = 2**22


def outline(config: PreTrainedConfig, *, attention: dict[str, str]) -> PreTrainedModel:
    """Make a model's modules in fp32 on the meta device; nothing is allocated.

    Args:
        config: transformers' own.
        attention: attention implementation by sub-config.

    Raises:
        ConfigError: the config's sizes do not make a model.
    """
    try:
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(
                config, dtype=torch.float32, attn_implementation=attention
            )
    except Exception as error:
        # Layers check their sizes as they are made, each in its own way.
        lines = str(error).splitlines() or [""]
        raise ConfigError(
            f"The config of '{config.model_type}' makes no model: {type(error).__name__}: "
            f"{lines[0]}",
            cure="Correct plan.model.sizes, or config.json of the weights",
        ) from error


class Reading:
    """The weights of some files on their way into one model."""

    def __init__(
        self, model: PreTrainedModel, *, spec: ModelSpec, seed: int, device: torch.device
    ) -> None:
        """Match names, draw what may be missing, compute the buffers that no file has.

        Args:
            model: what `outline` made; its buffers are on `device` afterwards.
            spec: names the weights, and what they may lack.
            seed: draws what they lack; the same draws as transformers'.
            device: where buffers go.

        Raises:
            ConfigError: the files do not fit the model.
        """
        self._model = model
        self._spec = spec
        self._files, self._match = _open(model, spec=spec)
        computed = {name for name, _ in model.named_non_persistent_buffers()}
        self._buffers = [name for name, _ in model.named_buffers() if name not in computed]
        self._seed = seed
        full = {
            plain_name(name): name for name, _ in model.named_parameters(remove_duplicate=False)
        }
        missing = [full[name] for name in self._match.missing]
        drawn = initialise(model, missing=missing, seed=seed, device=device)
        self._drawn = {plain_name(name): tensor for name, tensor in drawn.items()}
        self._converted: dict[str, torch.Tensor] = {}
        self._means: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def fill(self, module: nn.Module, *, device: torch.device) -> None:
        """Allocate what this rank holds of every weight, and read it.

        Args:
            module: the model, or what holds it; sharded or whole. Its names are the model's still.
            device: where weights go.

        Raises:
            ConfigError: names that are tied have different weights in the files.
        """
        materialise(module, device=device)
        for name, parameter in self._model.named_parameters():
            self._read(name, tensor=parameter)
        self._finish()

    def allocate(self, module: nn.Module, *, device: torch.device) -> None:
        """Allocate every weight without filling it; on a CPU that takes addresses, not memory."""
        materialise(module, device=device)

    @torch.no_grad()
    def stream(self, *, dtype: torch.dtype) -> Iterator[nn.Parameter]:
        """Fill what `allocate` made, and yield each weight; whoever takes it may cut it up.

        Args:
            dtype: what weights are rounded to.

        Raises:
            ConfigError: names that are tied have different weights in the files.
        """
        for name, parameter in list(self._model.named_parameters()):
            self._read(name, tensor=parameter)
            parameter.data = parameter.data.to(dtype)
            yield parameter
        self._finish()

    def _finish(self) -> None:
        """Read the buffers that files have, and let go of what was kept for their turn."""
        for name in self._buffers:
            self._read(name, tensor=self._model.get_buffer(name))
        self._drawn.clear()
        self._converted.clear()

    def _read(self, name: str, *, tensor: torch.Tensor) -> None:
        """Write this rank's part of a weight, given by its first name."""
        local, slices = _local(tensor)
        if not local.numel():
            return
        if is_adapter(name):
            local.copy_(self._adapter(name, shape=tensor.shape)[slices])
            return
        name = plain_name(name)
        if name in self._drawn:
            local.copy_(self._drawn[name][slices])
            return
        first, *others = self._match.tied.get(name, (name,))
        self._write(local, name=first, slices=slices)
        for other in others:
            again = torch.empty_like(local)
            self._write(again, name=other, slices=slices)
            if not torch.equal(local, again):
                raise ConfigError(
                    f"The files of the weights have other values in '{other}' than in "
                    f"'{first}', which their config ties together",
                    cure="Set tie_word_embeddings to false in config.json, or remove one of them",
                )

    def _adapter(self, name: str, *, shape: torch.Size) -> torch.Tensor:
        """Make an adapter's tensor whole: no file has it, and DoRA's begins with its layer's."""
        if not name.endswith(MAGNITUDE):
            return adapters.draw(name, shape=shape, seed=self._seed)
        base = f"{name.removesuffix(MAGNITUDE)}.weight"
        if base in self._drawn:
            return adapters.magnitudes(self._drawn[base])
        key = self._match.direct.get(base)
        weight_OI = self._convert(base) if key is None else self._files.read(key)
        return adapters.magnitudes(weight_OI.float())

    def _write(self, local: torch.Tensor, *, name: str, slices: tuple[slice, ...]) -> None:
        key = self._match.direct.get(name)
        if key is None:
            local.copy_(self._convert(name)[slices])
            return
        if not slices:
            local.copy_(self._files.read(key))
            return
        rows, *rest = slices
        num_rows = self._match.grown.get(name, rows.stop)
        num_old = min(max(num_rows - rows.start, 0), local.shape[0])
        # In parts, for what is read of a mapped file may be a copy.
        step = max(1, _CHUNK_ELEMENTS * local.shape[0] // local.numel())
        for start in range(0, num_old, step):
            stop = min(start + step, num_old)
            part = slice(rows.start + start, rows.start + stop)
            local[start:stop].copy_(self._files.read(key, slices=(part, *rest)))
        if num_old < local.shape[0]:
            local[num_old:].copy_(self._mean_row(key)[tuple(rest)].expand_as(local[num_old:]))

    def _convert(self, name: str) -> torch.Tensor:
        """Return a weight that several tensors make; its siblings wait for their turn."""
        if name not in self._converted:
            conversion = self._match.converted[name]
            tensors = {key: self._files.read(key) for key, _ in conversion.sources}
            self._converted |= conversion.run(tensors, model=self._model)
        return self._converted.pop(name)

    def _mean_row(self, key: str) -> torch.Tensor:
        """Average a tensor's rows in float64, some at a time."""
        if key not in self._means:
            num_rows, *rest = self._files.shapes[key]
            total = torch.zeros(rest, dtype=torch.float64)
            step = max(1, _CHUNK_ELEMENTS // max(1, total.numel()))
            everything = [slice(0, size) for size in rest]
            for start in range(0, num_rows, step):
                rows = slice(start, min(start + step, num_rows))
                part = self._files.read(key, slices=(rows, *everything))
                total += part.sum(dim=0, dtype=torch.float64)
            self._means[key] = total / num_rows
        return self._means[key]


def initialise(
    model: PreTrainedModel, *, missing: Sequence[str], seed: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Compute the buffers that are in no file, and draw missing weights, as transformers does.

    Args:
        model: on the meta device; its weights stay there.
        missing: full names of the weights to draw.
        seed: where the draws begin; the global generator stays as it was.
        device: where the buffers go.

    Returns:
        What was drawn, whole, on the CPU.

    Source: `_finalize_model_loading` of transformers' `from_pretrained`.
    """
    for tensor in chain(model.parameters(), model.buffers()):
        # Whatever bears this mark is left alone by transformers' initialisation.
        tensor._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
    buffers = [name for name, _ in model.named_non_persistent_buffers()]
    kept = {name: _place(model, name) for name in missing}
    for name in buffers:
        _place(model, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.initialize_weights()
    for name in buffers:
        owner, own_name = _owner(model, name)
        setattr(owner, own_name, getattr(owner, own_name).to(device))
    drawn = {}
    for name, empty in kept.items():
        owner, own_name = _owner(model, name)
        drawn[name] = getattr(owner, own_name).detach()
        setattr(owner, own_name, empty)
    return drawn


def materialise(module: nn.Module, *, device: torch.device) -> None:
    """Allocate what is on the meta device, without values; what is tied stays one tensor."""
    owners = _owners(module)
    # FSDP2's modules notice here that their shards are others.
    module._apply(lambda each: torch.empty_like(each, device=device) if each.is_meta else each)
    for (first, name), *others in owners.values():
        for owner, own_name in others:
            owner._parameters[own_name] = first._parameters[name]


def _open(model: PreTrainedModel, *, spec: ModelSpec) -> tuple[TensorFiles | TowerFiles, Match]:
    """Open the files that a spec names, and match their names with the model's."""
    if spec.towers is not None:
        return find(model, spec=spec)
    folder = find_folder(spec)
    if spec.weights_sha256 is not None:
        check_digest(folder, spec=spec)
    files = TensorFiles(folder)
    return files, match(model, files=files, spec=spec)


def _owners(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """List the places of each parameter on the meta device, by its identity."""
    owners: defaultdict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None and parameter.is_meta:
                owners[id(parameter)].append((each, name))
    return owners


def _place(model: nn.Module, name: str) -> torch.Tensor:
    """Put an unmarked tensor on the CPU in a tensor's place; returns that one."""
    owner, own_name = _owner(model, name)
    empty = getattr(owner, own_name)
    real = torch.empty_like(empty, device="cpu")
    setattr(owner, own_name, nn.Parameter(real) if isinstance(empty, nn.Parameter) else real)
    return empty


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own_name = name.rpartition(".")
    return model.get_submodule(path), own_name


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """Return what this rank has of a tensor, and where in the whole it lies."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(slice(0, size) for size in tensor.shape)
    local = tensor.to_local().detach()
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return local, tuple(
        slice(start, start + size) for start, size in zip(offsets, local.shape, strict=True)
    )
