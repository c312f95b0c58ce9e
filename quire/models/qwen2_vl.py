"""Qwen2-VL (Wang et al., arXiv:2409.12191) and Qwen2.5-VL: images of any size, patches that are
turned by row and column, four of which become one place, and a Qwen2 that counts places of images
the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from quire.common.frozen_record import replace
from quire.models.blocks import AttentionSpec, BlockSpec, MlpSpec, Sublayer, sequential
from quire.models.clip import VISION_ACTIVATIONS
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec, RowsSpec, VisionSpec
from quire.models.dimensions import read_dtype
from quire.models.fused import fused
from quire.models.parts import plain_mlp
from quire.models.qwen2 import declare_qwen2
from quire.models.rope import RopeSpec
from quire.models.tensors import LinearSpec, NormSpec, TensorSpec, layer_norm, linear, rms_norm
from quire.program.operations import Activation

TOWER = "visual"
_EPS = 1e-6
_THETA = 10_000.0
_VISION: Mapping[str, object] = {
    "depth": 32,
    "embed_dim": 1280,
    "num_heads": 16,
    "patch_size": 14,
}
_VISION_2_5: Mapping[str, object] = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
"""What sections leave out: the defaults of transformers' classes."""
RENAMED = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.visual.", "visual."),
)
"""Older and newer names of the same."""


def declare_qwen2_vl(config: ConfigReader) -> DecoderSpec:
    """Declare the tower, its merger, and the decoder."""
    tower = config.section("vision_config", _VISION)
    if tower is None:
        raise config.refuse("vision_config", "an object")
    decoder = read_decoder(config, declare_qwen2)
    hidden = tower.integer("embed_dim")
    tower.require("hidden_size", decoder.hidden_size)
    size = TowerSize.read(tower, hidden)
    ffn = int(hidden * tower.number("mlp_ratio", 4.0))
    activation = tower.choice("hidden_act", VISION_ACTIVATIONS, "quick_gelu")
    block = partial(size.plain_block, names=("fc1", "fc2"), ffn=ffn, activation=activation)
    norm = layer_norm(f"{TOWER}.merger.ln_q", hidden, _EPS)
    return with_tower(config, decoder, size.vision(config, block, norm, decoder.hidden_size))


def declare_qwen2_5_vl(config: ConfigReader) -> DecoderSpec:
    """Qwen2.5-VL (arXiv:2502.13923): RMS norms and gated MLPs in the tower, whose blocks attend
    within windows but for a few."""
    tower = config.section("vision_config", _VISION_2_5)
    if tower is None:
        raise config.refuse("vision_config", "an object")
    decoder = read_decoder(config, declare_qwen2)
    hidden = tower.integer("hidden_size")
    tower.require("out_hidden_size", decoder.hidden_size)
    size = TowerSize.read(tower, hidden)
    ffn = tower.integer("intermediate_size")
    activation = tower.choice("hidden_act", VISION_ACTIVATIONS, "silu")
    place = size.patch_size * size.merge
    window = tower.integer("window_size", 112)
    if window < place:
        raise tower.refuse("window_size", f"at least {place}")

    def block(at: str) -> BlockSpec:
        gate, up = (
            linear(f"{at}.mlp.{name}_proj", hidden, ffn, has_bias=True) for name in ("gate", "up")
        )
        down = linear(f"{at}.mlp.down_proj", ffn, hidden, has_bias=True)
        return sequential(
            Sublayer(rms_norm(f"{at}.norm1", hidden, _EPS), size.attention(at)),
            Sublayer(rms_norm(f"{at}.norm2", hidden, _EPS), MlpSpec(gate, up, down, activation)),
        )

    norm = rms_norm(f"{TOWER}.merger.ln_q", hidden, _EPS)
    vision = replace(
        size.vision(config, block, norm, decoder.hidden_size),
        window=window // place,
        whole_blocks=frozenset(tower.integers("fullatt_block_indexes", size.depth - 1)),
    )
    return with_tower(config, decoder, vision)


class TowerSize:
    """What the towers of the family have in common."""

    def __init__(
        self, hidden: int, num_heads: int, depth: int, patch: tuple[int, int, int]
    ) -> None:
        self.hidden, self.num_heads, self.depth = hidden, num_heads, depth
        self.patch_size, self.merge, self.num_frames = patch

    @classmethod
    def read(cls, tower: ConfigReader, hidden: int) -> TowerSize:
        """Read and check the section of the tower, whose rows have this width."""
        num_heads = tower.integer("num_heads", maximum=65536)
        if hidden % num_heads or hidden // num_heads % 4:
            raise tower.refuse("num_heads", f"divisors of {hidden} that leave multiples of 4")
        tower.require("in_channels", 3)
        tower.require("in_chans", 3)
        tower.ignore("spatial_patch_size", "tokens_per_second")
        section = tower.section("rope_parameters")
        if section is not None:
            section.require("rope_type", "axial")
            section.require("rope_theta", _THETA)
        patch = (
            tower.integer("patch_size", maximum=1024),
            tower.integer("spatial_merge_size", 2, maximum=64),
            tower.integer("temporal_patch_size", 2, maximum=64),
        )
        return cls(hidden, num_heads, tower.integer("depth", maximum=4096), patch)

    def attention(self, at: str) -> AttentionSpec:
        """Return a block's attention over all rows, whose projections are stored as one."""
        hidden, name = self.hidden, f"{at}.attn.qkv"
        head_dim = hidden // self.num_heads
        query, key, value = (
            LinearSpec(part.weight, replace(part.weight, name=f"{name}.bias", shape=(hidden,)))
            for part in fused(name, hidden, hidden, hidden, hidden)
        )
        output = linear(f"{at}.attn.proj", hidden, hidden, has_bias=True)
        rope = RopeSpec(head_dim, _THETA, is_of_grid=True)
        return AttentionSpec(
            query, key, value, output, head_dim, head_dim**-0.5, rope, is_causal=False
        )

    def plain_block(
        self, at: str, *, names: tuple[str, str], ffn: int, activation: Activation
    ) -> BlockSpec:
        """Return a block of layer norms before attention and an MLP, whose layers have these
        names."""
        first, second = names
        widths = (self.hidden, ffn, self.hidden)
        mlp = plain_mlp((f"{at}.mlp.{first}", f"{at}.mlp.{second}"), widths, activation)
        return sequential(
            Sublayer(layer_norm(f"{at}.norm1", self.hidden, _EPS), self.attention(at)),
            Sublayer(layer_norm(f"{at}.norm2", self.hidden, _EPS), mlp),
        )

    def vision(
        self,
        config: ConfigReader,
        block: Callable[[str], BlockSpec],
        norm: NormSpec,
        text: int,
        *,
        merger: tuple[str, str] = ("mlp.0", "mlp.2"),
        bias: TensorSpec | None = None,
    ) -> VisionSpec:
        """Return blocks between patches, whose entry may have a bias, and a merger to rows of the
        width `text`, whose layers have these names."""
        hidden, edge, merged = self.hidden, self.patch_size, self.hidden * self.merge**2
        weight = TensorSpec(
            f"{TOWER}.patch_embed.proj.weight",
            (hidden, 3 * self.num_frames * edge * edge),
            stored_as=(hidden, 3, self.num_frames, edge, edge),
        )
        tower = RowsSpec(
            width=weight.shape[1],
            entry=LinearSpec(weight, bias),
            blocks=tuple(block(f"{TOWER}.blocks.{index}") for index in range(self.depth)),
            final_norm=norm,
        )
        return VisionSpec(
            placeholder=config.integer("image_token_id", 151655, minimum=0),
            patch_size=edge,
            image_size=None,
            tower=tower,
            projector=RowsSpec(width=merged, exit=self.merger(f"{TOWER}.merger", merger, text)),
            num_frames=self.num_frames,
            merge=self.merge,
        )

    def merger(self, at: str, names: tuple[str, str], text: int) -> MlpSpec:
        """Return the layers that make a row of the width `text` of the patches of a place."""
        merged = self.hidden * self.merge**2
        first, second = names
        return plain_mlp((f"{at}.{first}", f"{at}.{second}"), (merged, merged, text), "gelu")


def read_decoder(
    config: ConfigReader, declare: Callable[[ConfigReader], DecoderSpec]
) -> DecoderSpec:
    """Declare the decoder: of a section, or, in older files, of the config's own keys."""
    is_tied = config.flag("tie_word_embeddings", False)
    text = config.section("text_config", {"tie_word_embeddings": is_tied})
    if text is None:
        return declare(config)
    if is_tied:
        text.require("tie_word_embeddings", True)
    spec = declare(text)
    at = config if config.has("dtype") or config.has("torch_dtype") else text
    return replace(spec, dtype=read_dtype(at))


def with_tower(config: ConfigReader, decoder: DecoderSpec, vision: VisionSpec) -> DecoderSpec:
    """Return the decoder with what reads images."""
    if vision.placeholder >= decoder.vocab_size:
        raise config.refuse("image_token_id", f"a token below {decoder.vocab_size}")
    return replace(decoder, vision=vision, renamed=RENAMED, optional_prefix="")
