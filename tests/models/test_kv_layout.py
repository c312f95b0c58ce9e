"""Groups of layers: which there are, how little memory lies idle, and what windows spare."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.common.numbers import ceil_div
from quire.config.limits import SchedulerLimits
from quire.models.blocks import KVLayerSpec
from quire.models.kv_layout import MAX_PADDING, lay_out
from quire.models.registry import declare

GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "torch_dtype": "bfloat16",
}
SIZES = {
    "1B": {
        "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "sliding_window": 512, "max_position_embeddings": 32_768,
    },
    "4B": {
        "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "sliding_window": 1024, "max_position_embeddings": 131_072,
    },
    "12B": {
        "hidden_size": 3840, "intermediate_size": 15_360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "sliding_window": 1024, "max_position_embeddings": 131_072,
    },
    "27B": {
        "hidden_size": 5376, "intermediate_size": 21_504, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
        "sliding_window": 1024, "max_position_embeddings": 131_072,
    },
}  # fmt: skip
"""Of Gemma 3, as its checkpoints have them."""
CONTEXT = 8192


@pytest.mark.parametrize(
    ("size", "groups", "depth", "gain"),
    [
        ("1B", {None: 2, 512: 11}, 2, 4.8),
        ("4B", {None: 1, 1024: 6}, 5, 3.9),
        ("12B", {None: 1, 1024: 5}, 8, 3.7),
        ("27B", {None: 3, 1024: 13}, 4, 3.3),
    ],
)
def test_gemma_3_serves_several_times_as_many_sequences_of_8192_tokens(
    size: str, groups: dict[int | None, int], depth: int, gain: float
) -> None:
    layers = declare(GEMMA3 | SIZES[size]).kv_layers
    layout = lay_out(layers, CONTEXT)
    assert Counter(layout.windows) == groups and layout.num_places == depth
    block_bytes = layout.block_bytes(layers, "bfloat16", 16)
    limits = SchedulerLimits(
        num_blocks=(16 << 30) // block_bytes,
        max_model_len=CONTEXT,
        windows=layout.windows,
        max_steps_in_flight=1,
    )
    whole = CONTEXT * sum(layer.bytes_per_token("bfloat16") for layer in layers)
    assert round(whole / (limits.num_blocks_kept(CONTEXT) * block_bytes), 1) == gain
    num_sequences = limits.num_sequences(CONTEXT)
    assert num_sequences > 0.9 * gain * ((16 << 30) // whole) - 1


def test_windows_that_no_sequence_outgrows_make_no_group() -> None:
    layers = [KVLayerSpec(2, 16, 64), KVLayerSpec(2, 16, None)]
    assert lay_out(layers, 64).windows == (None,)
    assert lay_out(layers, 65).windows == (None, 64)


def test_layers_of_different_shapes_keep_everything() -> None:
    layout = lay_out([KVLayerSpec(2, 16, 8), KVLayerSpec(1, 16, None)], 256)
    assert layout.windows == (None,) and layout.place_of == (0, 1)
    assert layout.block_bytes([KVLayerSpec(2, 16, 8), KVLayerSpec(1, 16, None)], "float32", 4) == (
        4 * 2 * 16 * 4 * 3
    )


@given(st.lists(st.sampled_from((None, 8, 32)), min_size=1, max_size=70))
def test_every_layer_has_a_place_of_its_own_and_little_is_idle(
    windows: list[int | None],
) -> None:
    layout = lay_out([KVLayerSpec(1, 16, window) for window in windows], 256)
    places = set(zip(layout.group_of, layout.place_of, strict=True))
    assert len(places) == len(windows)
    for window, group in zip(windows, layout.group_of, strict=True):
        assert layout.windows[group] == window
    num_rooms = len(layout.windows) * layout.num_places
    assert num_rooms <= (1 + MAX_PADDING) * len(windows)
    assert layout.num_places <= max(Counter(windows).values())


@given(
    num_tokens=st.integers(1, 400),
    size=st.sampled_from((1, 4, 16)),
    window=st.integers(1, 60),
    budget=st.integers(1, 40),
)
def test_the_longest_sequence_is_the_longest_that_fits(
    num_tokens: int, size: int, window: int, budget: int
) -> None:
    limits = SchedulerLimits(
        num_blocks=40, block_size=size, max_num_seqs=1, max_num_batched_tokens=budget,
        windows=(None, window),
    )  # fmt: skip
    longest = limits.longest_len(num_tokens)
    assert longest == num_tokens or limits.num_blocks_for(longest + 1) > 40
    assert limits.num_blocks_for(longest) <= 40
    assert limits.num_blocks_kept(num_tokens) <= limits.num_blocks_for(num_tokens)
    assert limits.num_blocks_for(num_tokens) <= 2 * ceil_div(num_tokens, size)
