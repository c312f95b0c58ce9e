"""`quire quantize` without its command line: a model folder in, a quantized model folder out.

Owns what lies around the weights: which folder is read, which small files go along, and that
nothing incomplete is ever found under the output's name.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from quire.common.scratch import sweep_folders, temporary_folder
from quire.config.engine import EngineConfig
from quire.engine.assembly.declaring import declare_stored
from quire.engine.assembly.model_files import ModelFiles, find_model
from quire.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from quire.quant.writer import Recipe

_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*")
_COPIED_BELOW = ("[0-9]*_*/*", "additional_chat_templates/*.jinja", "chat_templates/*.jinja")
"""Modules of sentence-transformers, and templates that requests can name."""
_PREFIX = ".quire-quantize-"
"""Of the folder that is written to until all is complete."""
_NOT_COPIED = ("config.json", "*.safetensors.index.json")


def quantize_model(model: str, recipe: Recipe, output: Path) -> None:
    """Write the floating-point `model`, quantized, as the new, or empty, folder `output`.

    Raises ConfigError for a model that is quantized already or an output that exists,
    CheckpointError for weights that cannot be read or files that cannot be written.
    """
    from safetensors import SafetensorError

    files = find_model(EngineConfig(model=model))
    if files.gguf is not None or files.config.get("quantization_config") is not None:
        raise ConfigError(
            f"model={model!r} is quantized already, or a GGUF file; give a folder of "
            "floating-point weights"
        )
    try:
        target = Path(os.path.realpath(output))  # a link stays one
        is_there = target.exists()
        place = target if is_there else target.parent  # a mounted folder cannot be replaced
        sweep_folders(place, _PREFIX)
        if is_there and (not target.is_dir() or any(map(_is_in_the_way, target.iterdir()))):
            raise ConfigError(f"{output} exists already; name a new folder")
        place.mkdir(parents=True, exist_ok=True)
        with temporary_folder(place, _PREFIX) as temporary:
            made = temporary / "model"
            made.mkdir()
            _write(files, recipe, made)
            if not is_there:
                made.rename(target)
            for path in sorted(made.iterdir(), key=_comes_last) if is_there else ():
                path.rename(target / path.name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{output} cannot be written: {error}") from error


def _is_in_the_way(path: Path) -> bool:
    """An empty file system may have a folder of its own."""
    return path.name != "lost+found"


def _comes_last(path: Path) -> bool:
    """A folder without its config is no model yet."""
    return path.name == "config.json"


def _write(files: ModelFiles, recipe: Recipe, folder: Path) -> None:
    from quire.quant.writer import write_checkpoint
    from quire.weights.checkpoint import SafetensorsCheckpoint

    spec, _ = declare_stored(files)
    with SafetensorsCheckpoint(files.folder, spec) as weights:
        changes = write_checkpoint(folder, spec, weights, recipe)
    config = {**files.config, **changes}
    text, untied = config.get("text_config"), "tie_word_embeddings"
    if isinstance(text, dict) and untied in changes:  # of a model with images
        config["text_config"] = text | {untied: changes[untied]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    excluded = {path for pattern in _NOT_COPIED for path in files.folder.glob(pattern)}
    for path in {path for pattern in _COPIED for path in files.folder.glob(pattern)} - excluded:
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    for path in (path for pattern in _COPIED_BELOW for path in files.folder.glob(pattern)):
        if path.is_file():
            (folder / path.parent.name).mkdir(exist_ok=True)
            shutil.copyfile(path, folder / path.parent.name / path.name)
