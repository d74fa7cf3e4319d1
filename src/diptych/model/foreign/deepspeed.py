"""DeepSpeed's checkpoints: ZeRO's parts of fp32 weights put together, or plain model states.

Source: deepspeed/utils/zero_to_fp32.py. Differs: nothing but tensors is read, and a weight is put
together when it is asked for.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from diptych.core.errors import FormatError
from diptych.model.foreign.pickles import Kept, damaged, read_tensors
from diptych.model.foreign.stored import Found, Stored, flatten, stored_from

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OTHERS = re.compile(r"layer_\d+.*model_states\.pt|.*expert_\d+.*model_states\.pt")
_PLAIN_NAME = re.compile(r"[\w-][\w.-]*")


def find_states(folder: Path) -> Path | None:
    """Return the folder that the model's states lie in: this one, or a step's in it.

    Raises:
        FormatError: `latest` names one that is not there.
    """
    if _matching(folder, _MODEL_FILE) or _matching(folder, _OTHERS):
        return folder
    latest = folder / "latest"
    name = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
    if _PLAIN_NAME.fullmatch(name):
        if not (folder / name).is_dir():
            raise FormatError(
                f"The file 'latest' in '{folder.name}' names '{name}', which is not there",
                cure="Copy that folder too, or give the folder of another step itself",
            )
        return find_states(folder / name)
    steps = [each for each in folder.glob("global_step*") if each.is_dir()]
    return find_states(steps[0]) if len(steps) == 1 else None


def read_deepspeed(folder: Path) -> Found:
    """List the weights of a checkpoint, in fp32 where ZeRO keeps them so.

    Raises:
        FormatError: a part is missing, damaged, or of a layout that is not built.
    """
    others = _matching(folder, _OTHERS)
    model_files = _matching(folder, _MODEL_FILE)
    if others or any(int(found[2]) for _, found in model_files):
        raise FormatError(
            f"The checkpoint '{folder.name}' was cut by tensor, pipeline or expert parallelism",
            allowed="Data parallelism with any ZeRO stage",
            cure="Have the trainer that wrote it save the whole model",
        )
    parts = _matching(folder, _OPTIMIZER_FILE)
    models = [_read_model(path) for path, _ in model_files]
    if not parts:
        return _plain(models[0], path=model_files[0][0])
    states = [_read_optimizer(path) for path, _ in parts]
    stage, size = _number(states[0]["zero_stage"]), _largest(states[0]["partition_count"])
    if len(states) != size or (stage == 3 and len(models) != size):
        raise FormatError(
            f"The checkpoint '{folder.name}' was written by {size} ranks, and has the parts of "
            f"{len(states)} optimizers and {len(models)} models",
            cure="Copy the files of all ranks into one folder",
        )
    put_together = _divided if stage == 3 else _end_to_end
    tensors = put_together(models, states=states, path=model_files[0][0])
    shared = models[0].get("shared_params", {})
    tensors |= {name: tensors[same] for name, same in shared.items() if same in tensors}
    return Found(form=f"DeepSpeed's, ZeRO {stage} on {size} ranks", tensors=tensors)


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    """List the files of a name, in the order of their ranks."""
    pairs = ((path, pattern.fullmatch(path.name)) for path in folder.iterdir())
    found = [(path, match) for path, match in pairs if match is not None]
    return sorted(found, key=lambda pair: [int(each or 0) for each in pair[1].groups()])


def _read_model(path: Path) -> dict[str, Any]:
    found = read_tensors(path)
    if not isinstance(found, dict) or not isinstance(found.get("module"), dict):
        raise damaged(path, why="it has no model's states")
    return found


def _read_optimizer(path: Path) -> dict[str, Any]:
    found = read_tensors(path)
    state = found.get("optimizer_state_dict") if isinstance(found, dict) else None
    if not isinstance(state, dict) or not {"zero_stage", "partition_count"} <= state.keys():
        raise damaged(path, why="it has no state of ZeRO's optimizer")
    return state


def _plain(model: dict[str, Any], *, path: Path) -> Found:
    tensors = flatten(model["module"])
    groups = model.get("param_shapes") or []
    shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
    if any(name in tensors and tensors[name].shape != shape for name, shape in shapes.items()):
        raise damaged(path, why="its weights lie in optimizers' files, which are not there")
    return Found(form="DeepSpeed's, without ZeRO", tensors=tensors)


def _end_to_end(
    models: list[dict[str, Any]], *, states: list[dict[str, Any]], path: Path
) -> dict[str, Stored]:
    """Stages 1 and 2: a group's weights lie end to end, and each rank holds a run of that."""
    # Whole on every rank; what does not train has no other place in stage 1.
    tensors = flatten(models[0]["module"])
    paddings = states[0].get("param_alignment_paddings")
    for number, names in enumerate(models[0]["param_shapes"]):
        runs = [state["single_partition_of_fp32_groups"][number] for state in states]
        gaps = paddings[number] if paddings is not None else [0] * len(names)
        begin = 0
        for (name, shape), gap in zip(names.items(), gaps, strict=True):
            end = begin + shape.numel()
            tensors[name] = Stored(
                shape=tuple(shape),
                dtype=runs[0].dtype,
                read=partial(_cut, runs, begin=begin, end=end, shape=shape),
            )
            begin = end + gap
        if begin > sum(run.numel() for run in runs):
            raise damaged(path, why=f"group {number} has fewer elements than its weights")
    return tensors


def _cut(runs: list[torch.Tensor], *, begin: int, end: int, shape: torch.Size) -> torch.Tensor:
    """Take elements out of runs that lie one after the other."""
    starts = [0, *accumulate(run.numel() for run in runs)]
    parts = [
        run[max(0, begin - start) : max(0, end - start)]
        for run, start in zip(runs, starts, strict=False)
    ]
    return torch.cat(parts).view(shape)


def _divided(
    models: list[dict[str, Any]], *, states: list[dict[str, Any]], path: Path
) -> dict[str, Stored]:
    """Stage 3: each weight is cut into as many runs as there are ranks, the last one padded."""
    module = models[0]["module"]
    tensors = {name: stored_from(module[name]) for name in models[0]["buffer_names"]}
    tensors |= _frozen_of_all(models)
    groups = [state["fp32_flat_groups"] for state in states]
    shapes = ((name, shape) for group in models[0]["param_shapes"] for name, shape in group.items())
    begin = 0
    for name, shape in shapes:
        end = begin + -(-shape.numel() // len(groups))
        tensors[name] = Stored(
            shape=tuple(shape),
            dtype=groups[0][0].dtype,
            read=partial(_join, groups, begin=begin, end=end, shape=shape),
        )
        begin = end
    if begin != sum(run.numel() for run in groups[0]):
        raise damaged(path, why="its weights have other numbers of elements than the optimizer's")
    return tensors


def _join(
    groups: list[list[torch.Tensor]], *, begin: int, end: int, shape: torch.Size
) -> torch.Tensor:
    run = torch.Size([end - begin])
    parts = [_cut(runs, begin=begin, end=end, shape=run) for runs in groups]
    return torch.cat(parts)[: shape.numel()].view(shape)


def _frozen_of_all(models: list[dict[str, Any]]) -> dict[str, Stored]:
    """Stage 3: frozen weights are cut as the others, and lie in the models' files."""
    tensors = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        runs = [[model["frozen_param_fragments"][name].flatten()] for model in models]
        read = partial(_join, runs, begin=0, end=runs[0][0].numel(), shape=shape)
        tensors[name] = Stored(shape=tuple(shape), dtype=runs[0][0].dtype, read=read)
    return tensors


def _number(value: Any) -> int:
    return int(value.args[0]) if isinstance(value, Kept) else int(value)


def _largest(value: Any) -> int:
    """Return how many ranks there were; a group of its own may have been shared out over fewer."""
    return max(value) if isinstance(value, list) else value
