"""The confined process: a checkpoint of another trainer in, safetensors and `result.json` out.

`python -m diptych.model.foreign.convert <checkpoint> <config folder> <folder> <bytes> <seconds>`,
started by `importing`. It gives up what it does not need before it imports torch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.core.errors import ConfigError, DiptychError, FormatError, RunError
from diptych.core.sandbox import confine

if TYPE_CHECKING:
    import torch

    from diptych.model.foreign.stored import Found, Stored

RESULT = "result.json"
WEIGHTS = "weights"
_SHARD_BYTES = 4 * 2**30


def main(arguments: list[str]) -> None:
    """Convert one checkpoint; an error that is meant for people is written to the result."""
    checkpoint, config, folder = map(Path, arguments[:3])
    confined = confine(folder, memory_bytes=int(arguments[3]), cpu_s=int(arguments[4]))
    try:
        result = _convert(checkpoint, config=config, folder=folder / WEIGHTS)
    except Exception as error:
        said = error if isinstance(error, DiptychError) else _explain(error)
        result = {"error": type(said).__name__, **vars(said)}
    text = json.dumps({**result, "confined": asdict(confined)})
    (folder / RESULT).write_text(text, encoding="utf-8")


def _explain(error: Exception) -> DiptychError:
    """Say what is behind an error that was made for nobody."""
    text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if isinstance(error, MemoryError | ImportError) or "allocate memory" in text:
        return RunError(
            f"Reading the checkpoint needs more memory than it may take ({text})",
            cure="Raise --memory-gib",
        )
    return FormatError(f"The checkpoint cannot be read ({text})", cure="Copy it again")


def _convert(checkpoint: Path, *, config: Path, folder: Path) -> dict[str, Any]:
    found = read_checkpoint(checkpoint)
    # Not before, for transformers costs seconds to import.
    from diptych.model import config_file
    from diptych.model.foreign.fitting import fit

    fitted = fit(found.tensors, config=config_file.read(config / "config.json"))
    folder.mkdir()
    _write(fitted.tensors, folder=folder)
    return {
        "form": found.form,
        "num_tensors": len(fitted.tensors),
        "num_bytes": sum(each.num_bytes for each in fitted.tensors.values()),
        "dtypes": sorted({str(each.dtype).partition(".")[2] for each in fitted.tensors.values()}),
        "prefix": fitted.prefix,
        "num_left_out": len(fitted.left_out),
    }


def read_checkpoint(path: Path) -> Found:
    """Find out which format it is, and list its tensors.

    Raises:
        ConfigError: it is none of those that are built.
        FormatError: a file is damaged, or asks for what is no tensor.
    """
    from diptych.model.foreign.deepspeed import find_states, read_deepspeed
    from diptych.model.foreign.distributed import METADATA, read_distributed
    from diptych.model.foreign.whole import find_files, read_whole

    if path.is_dir():
        for folder in (path, *_below(path, METADATA)):
            if (folder / METADATA).is_file():
                return read_distributed(folder)
        states = find_states(path)
        if states is not None:
            return read_deepspeed(states)
    files = find_files(path)
    if files:
        return read_whole(files)
    names = ", ".join(sorted(each.name for each in path.iterdir())[:8])
    cure = "Name the folder that the trainer's checkpoint lies in"
    if any(path.glob("*.safetensors")):
        cure = "It has safetensors: name it in plan.model.weights as it is"
    raise ConfigError(
        f"'{path.name}' is no checkpoint that can be read; in it are {names or 'no files'}",
        allowed="DeepSpeed's (*_model_states.pt), torch's distributed (.metadata and *.distcp), "
        "and state dicts (*.bin, *.pt, *.pth)",
        cure=cure,
    )


def _below(path: Path, name: str) -> list[Path]:
    """List folders in a folder that have such a file: accelerate saves model and optimizer so."""
    found = sorted(each.parent for each in path.glob(f"*/{name}"))
    found = [each for each in found if not each.name.startswith("optim")]
    return found if len(found) == 1 else []


def _write(tensors: dict[str, Stored], *, folder: Path) -> None:
    """Write safetensors of a few gigabytes each, and the index that names them."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.num_bytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.num_bytes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard({name: tensors[name] for name in names}, path=folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _write_shard(tensors: dict[str, Stored], *, path: Path) -> None:
    from safetensors.torch import save_file

    # Copies: two names of one tied weight may not share their bytes.
    values = {name: each.read().detach().clone() for name, each in tensors.items()}
    broken = [name for name, value in values.items() if _is_broken(value)]
    if broken:
        raise FormatError(
            f"{len(broken)} tensors have numbers that are not finite, such as {broken[0]}",
            cure="Take a checkpoint from before that training broke",
        )
    save_file({name: each.contiguous() for name, each in values.items()}, path, {"format": "pt"})


def _is_broken(value: torch.Tensor) -> bool:
    # isfinite knows no dtypes of eight bits.
    return value.is_floating_point() and value.itemsize > 1 and not bool(value.isfinite().all())


if __name__ == "__main__":
    main(sys.argv[1:])
