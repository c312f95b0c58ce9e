"""What the projections of a GGUF file are held as: the torch-free half of `quire.quant.gguf`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quire.errors import CheckpointError
from quire.models.declaration import DecoderSpec
from quire.quant.formats import IntegerFormat, WeightFormats, formats_at_load
from quire.weights.gguf.model import GgufModel

# Encoding to bits, group size and whether there are offsets.
_HELD: Mapping[str, tuple[Literal[4, 8], int, bool]] = {
    "Q4_0": (4, 32, False),
    "Q4_1": (4, 32, True),
    "Q5_0": (8, 32, False),
    "Q5_1": (8, 32, True),
    "Q8_0": (8, 32, False),
    "Q4_K": (4, 32, True),
    "Q5_K": (8, 32, True),
    "Q6_K": (8, 16, False),
}
_MXFP4_BLOCK = 32


@dataclass(frozen=True, slots=True)
class GgufStorage:
    """A file's projections that are stored as integers, and how all of them will be held."""

    model: GgufModel
    by_name: Mapping[str, IntegerFormat]
    formats: WeightFormats
    activations: Literal["int8", "float"]
    head_dim: int


def read_gguf_storage(
    model: GgufModel, spec: DecoderSpec, method: str | None, mxfp4_scale_bytes: int = 1
) -> GgufStorage:
    """Integers stay as they are; with `method` ("int8" or "int4") activations are quantized, and so
    are floating-point projections. Raises CheckpointError where the file does not fit the
    declaration.
    """
    model.check(spec)
    activations: Literal["int8", "float"] = "float" if method is None else "int8"
    found: dict[str, IntegerFormat | None] = {}
    names: dict[str, int] = {}
    for parts in spec.projections:
        for part in parts:
            stored = model.stored_name(part.weight)
            encoding = model.file.tensors[stored].encoding.name
            names[encoding] = names.get(encoding, 0) + 1
            held = None
            if encoding == "MXFP4":
                held = IntegerFormat(
                    4, _MXFP4_BLOCK, "float", is_mxfp4=True, scale_bytes=mxfp4_scale_bytes
                )
            elif encoding in _HELD:
                bits, size, has_offsets = _HELD[encoding]
                held = IntegerFormat(bits, size, activations, has_offsets)
            if part.holds_floats:
                continue
            # gate and up of gpt-oss have one name in checkpoints
            if found.setdefault(part.weight.name, held) != held:
                raise CheckpointError(
                    f"{model.file.path}: {stored} is {encoding}, and what belongs to it is stored "
                    "otherwise; both must have one encoding"
                )
    by_name = {name: held for name, held in found.items() if held is not None}
    formats_held = (
        by_name if method is None else {**formats_at_load(spec, method).by_name, **by_name}
    )
    counts = ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
    formats = WeightFormats(formats_held, f"GGUF: projections {counts}; activations {activations}")
    return GgufStorage(model, by_name, formats, activations, spec.attentions[0].head_dim)
