"""Types of the extension module (csrc/cpu).

Pointers are addresses of contiguous CPU memory. How much memory lies behind one is not known here:
that a tensor has the shape that goes with it is checked by `quire.kernels.cpu` before its address
is passed. Everything else is checked before anything is read or written, and raises ValueError
(IndexError for a token id): codes (dtypes are 0 for float32 and 1 for bfloat16), counts and sizes,
null and unaligned addresses, numbers that must be finite, indices that come from tensors (tokens,
slots, blocks, positions, rows), and outputs that overlap with inputs.
"""

from typing import overload

def kernel_times() -> dict[str, float]:
    """Seconds that kernels have run for in this process: linear, attention, elementwise,
    sampling, and gathering between ranks."""

MAX_THREADS: int

def num_threads() -> int: ...
def set_num_threads(count: int) -> None: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...
def supported_isas() -> list[str]: ...
def emulated_isas() -> list[str]: ...

WEIGHT_LAYOUT: str
MAX_INT8_GROUP: int

class LinearWeight:
    """How a packed weight lies in memory, and where; keeps nothing alive."""

    def __init__(
        self,
        format: str,
        num_outputs: int,
        num_inputs: int,
        group_size: int,
        has_offsets: bool,
        has_int8_inputs: bool,
    ) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    def attach(self, data: int, bias: int, /) -> None: ...
    def attach_bias(self, bias: int, /) -> None: ...

def pack(weight: LinearWeight, values: int, /) -> None: ...
def pack_quantized(weight: LinearWeight, values: int, scales: int, offsets: int, /) -> None: ...
def linear(
    weight: LinearWeight, x: int, x_dtype: int, num_rows: int, out: int, out_dtype: int, /
) -> None: ...
def linear_gated(
    weight: LinearWeight,
    activation: int,
    x: int,
    x_dtype: int,
    num_rows: int,
    out: int,
    out_dtype: int,
    /,
) -> None: ...
def linear_peaks(
    weight: LinearWeight, x: int, x_dtype: int, num_rows: int, ids: int, values: int, /
) -> None: ...
def linear_draws(
    weight: LinearWeight,
    x: int,
    x_dtype: int,
    num_rows: int,
    ids: int,
    values: int,
    num_draws: int,
    rows: int,
    scales: int,
    seeds: int,
    positions: int,
    drawn: int,
    /,
) -> None: ...

class ExpertRouting:
    """See csrc/cpu/dispatch.hpp; does not keep the bias alive."""

    def __init__(
        self,
        num_experts: int,
        num_chosen: int,
        is_normalised: bool,
        is_sigmoid: bool,
        num_groups: int,
        num_groups_chosen: int,
        sums_best_two: bool,
        factor: float,
        bias: int,
    ) -> None: ...

def choose_experts(
    routing: ExpertRouting,
    logits: int,
    num_tokens: int,
    ids: int,
    weights: int,
    /,
) -> None: ...
def apply_experts(
    up: LinearWeight,
    down: LinearWeight,
    num_experts: int,
    activation: int,
    ids: int,
    weights: int,
    num_chosen: int,
    x: int,
    dtype: int,
    num_tokens: int,
    out: int,
    pool: ExpertPool | None,
    number: int,
    adapters: list[Adapter],
    of_token: int,
    up_number: int,
    down_number: int,
) -> None: ...

class ExpertFileError(RuntimeError): ...

class ExpertPool:
    """See csrc/cpu/expert_pool.hpp; does not keep its memory or biases alive."""

    def __init__(
        self, path: str, descriptor: int, memory: int, slot_bytes: int, num_slots: int
    ) -> None: ...
    def add_layer(
        self,
        up: LinearWeight,
        down: LinearWeight,
        num_experts: int,
        slot_bytes: int,
        up_start: int,
        down_start: int,
        up_sums: list[int],
        down_sums: list[int],
    ) -> None: ...
    def fill(self) -> None: ...
    def set_reads_ahead(self, reads_ahead: bool) -> None: ...
    def counts(self) -> tuple[int, int, int, float, int, int, int]: ...

def expert_checksums(data: int, num_experts: int, expert_bytes: int, /) -> list[int]: ...
def head_linear(
    weight: LinearWeight,
    num_heads: int,
    size: int,
    x: int,
    dtype: int,
    num_tokens: int,
    out: int,
    /,
) -> None: ...

class Loading:
    """Reads weights out of files and packs them on threads that need no interpreter;
    see csrc/cpu/loading.cpp."""

    def __init__(self, owner: object, /) -> None: ...
    @staticmethod
    def num_bytes(dtype: int, num_outputs: int, num_inputs: int, /) -> int: ...
    def add(
        self, data: int, dtype: int, is_table: bool, num_outputs: int, num_inputs: int, /
    ) -> None: ...
    def add_part(self, file: int, start: int, num_rows: int, type: int, /) -> None: ...
    def start(self, library: str, /) -> None: ...
    def finish(self, num_threads: int, /) -> None: ...
    def cancel(self) -> None: ...

def probe_floats(rounds: int, /) -> float:
    """Multiply-adds in float32: operations per second of the whole team."""

def probe_pairs(rounds: int, /) -> float:
    """Of products of bfloat16, as they are multiplied."""

def probe_integers(rounds: int, /) -> float:
    """Products of bytes, summed: operations per second of the whole team."""

def probe_half_bytes(rounds: int, /) -> float:
    """Of bytes and weights of four bits, as they are multiplied."""

def probe_read(data: int, num_bytes: int, /) -> float:
    """Bytes per second of the whole team."""

def rms_norm(
    x: int,
    residual: int,
    weight: int,
    sum: int,
    out: int,
    dtype: int,
    weight_dtype: int,
    num_rows: int,
    width: int,
    eps: float,
    weight_offset: float,
    /,
) -> None: ...
def layer_norm(
    x: int,
    weight: int,
    bias: int,
    out: int,
    dtype: int,
    weight_dtype: int,
    num_rows: int,
    width: int,
    eps: float,
    /,
) -> None: ...
def is_finite(x: int, dtype: int, count: int, /) -> bool: ...
def activate(x: int, out: int, dtype: int, activation: int, count: int, /) -> None: ...
def gate_rows(x: int, gate: int, out: int, dtype: int, num_rows: int, width: int, /) -> None: ...
def gated(
    gate_up: int, out: int, dtype: int, activation: int, num_rows: int, width: int, /
) -> None: ...
def rope(
    x: int,
    positions: int,
    cos_sin: int,
    dtype: int,
    num_rows: int,
    stride: int,
    num_heads: int,
    head_size: int,
    half: int,
    num_positions: int,
    is_interleaved: bool,
    start: int,
    /,
) -> None: ...

class Lookup:
    @overload
    def __init__(self, table: int, dtype: int, num_rows: int, width: int, /) -> None: ...
    @overload
    def __init__(self, weight: LinearWeight, /) -> None: ...

def embedding(lookup: Lookup, token_ids: int, num_tokens: int, out: int, /) -> None: ...
def write_kv(
    key: int,
    value: int,
    key_cache: int,
    value_cache: int,
    slots: int,
    dtype: int,
    kv_format: int,
    num_tokens: int,
    key_stride: int,
    value_stride: int,
    num_kv_heads: int,
    head_size: int,
    num_blocks: int,
    block_size: int,
    /,
) -> None: ...
def copy_blocks(
    cache: int, num_blocks: int, block_bytes: int, sources: int, destinations: int, count: int, /
) -> None: ...
def paged_attention(
    query: int,
    out: int,
    dtype: int,
    key_cache: int,
    value_cache: int,
    kv_format: int,
    num_tokens: int,
    query_stride: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    num_blocks: int,
    block_size: int,
    query_start: int,
    context_len: int,
    num_sequences: int,
    block_tables: int,
    table_stride: int,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: int,
    value_size: int,
    key_ends: int,
    /,
) -> None: ...
def bidirectional_attention(
    query: int,
    key: int,
    value: int,
    out: int,
    dtype: int,
    num_tokens: int,
    stride: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    query_start: int,
    context_len: int,
    num_sequences: int,
    scale: float,
    window: int,
    bias: int,
    bias_reach: int,
    /,
) -> None: ...
def shared_prefixes(
    query_start: int,
    context_len: int,
    num_sequences: int,
    block_tables: int,
    table_stride: int,
    block_size: int,
    window: int,
    max_members: int,
    /,
) -> list[tuple[int, list[int]]]: ...
def sampling_peaks(
    logits: int, num_rows: int, num_tokens: int, ids: int, values: int, /
) -> None: ...
def sampling_penalise(
    logits: int,
    num_rows: int,
    num_tokens: int,
    row: int,
    count: int,
    token_ids: int,
    num_ids: int,
    start: int,
    output_start: int,
    repetition: int,
    frequency: int,
    presence: int,
    /,
) -> None: ...

# The arguments that the next three begin with: logits, num_rows, num_tokens, row, max_logit, scale,
# count.
def sampling_cuts(*arguments: int) -> None:
    """... top_k, top_p, floor, values, ids"""

def sampling_draw(*arguments: int) -> None:
    """... threshold_values, threshold_ids (both may be 0), seeds, positions, out"""

def sampling_score(*arguments: int) -> None:
    """... threshold_values, threshold_ids (both may be 0), token_ids, num_top, totals, ranks,
    top_ids"""

def sampling_noise(seed: int, position: int, num_tokens: int, out: int, /) -> None: ...

# An adapter's weights by their numbers (csrc/cpu/lora.hpp). Keeps no memory alive.
LORA_PANEL: int
LORA_RANKS: int
LORA_CHUNK: int

class Adapter:
    def __init__(self, dtype: int, num_weights: int, /) -> None: ...
    def set_weight(
        self,
        number: int,
        num_ranks: int,
        num_inputs: int,
        num_outputs: int,
        down: int,
        scales: int,
        parts: list[tuple[int, int, int, int, int, int, int]],
        /,
    ) -> None:
        """Parts: first output, outputs, first rank, rank, address of `up`."""

def add_lora_embedding(
    adapters: list[Adapter],
    of_row: int,
    weight: int,
    ids: int,
    num_rows: int,
    y: int,
    y_dtype: int,
    num_columns: int,
    /,
) -> None: ...
def add_lora(
    adapters: list[Adapter],
    of_row: int,
    weight: int,
    x: int,
    x_dtype: int,
    num_rows: int,
    num_inputs: int,
    y: int,
    y_dtype: int,
    first_column: int,
    num_columns: int,
    /,
) -> None: ...

# What a program is made of (csrc/cpu/program.hpp). Nothing here keeps memory alive; 0 stands for an
# address that is absent.
class NormWeight:
    def __init__(
        self,
        *,
        weight: int,
        bias: int,
        dtype: int,
        width: int,
        eps: float,
        offset: float,
        is_layer: bool,
    ) -> None: ...

class KVCache:
    def __init__(
        self,
        *,
        keys: int,
        values: int,
        format: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_size: int,
    ) -> None: ...

MAX_RANKS: int
GROUP_STATE_BYTES: int
"""What ranks share besides buffers, zeros at first."""

class Gathering:
    """A rank's end of what ranks exchange: see csrc/cpu/gathering.hpp. Waits raise RuntimeError
    where a rank is gone, or silent for `silence_s`."""

    def __init__(
        self, memory: int, num_bytes: int, rank: int, size: int, silence_s: float
    ) -> None: ...
    def columns(
        self,
        own: int,
        num_rows: int,
        columns: list[tuple[int, int]],
        width: int,
        size: int,
        out: int,
    ) -> None:
        """`columns`: first and one past the last, of elements of `size` bytes."""
    def rows(self, rows: int, is_own: list[bool], row_bytes: int) -> None: ...
    def connect(self, peers: list[tuple[int, int]], num_bytes: int) -> None:
        """Reach ranks that have a memory of their own, of `num_bytes` as this one, by connected
        sockets (rank and descriptor), which are closed by `reset` and at the end."""
    def post(self, first: int, num_bytes: int) -> None:
        """`num_bytes` of the memory, from `first` on, go to ranks that have one of their own."""
    def wait_done(self) -> None: ...
    def wait_posted(self, timeout_s: float) -> bool: ...
    def finish(self, first: int, num_bytes: int) -> None:
        """Likewise, to rank 0."""
    def reset(self) -> None: ...
    def beat(self) -> None: ...
    def lose(self, rank: int) -> None: ...
    @property
    def is_lost(self) -> bool: ...

class Operations:
    """A list of operations. Values are (column in the arena, width); the result is at column -1,
    `width` wide."""

    def __init__(self, dtype: int, width: int) -> None: ...
    def add(
        self,
        kind: int,
        is_narrow: bool,
        inputs: list[tuple[int, int]],
        outputs: list[tuple[int, int]],
        table: Lookup | None,
        of_positions: bool,
        factor: float,
        norm: NormWeight | None,
        key_norm: NormWeight | None,
        weight: LinearWeight | None,
        first_output: int,
        number: int,
        activation: int,
        heads: tuple[int, int, int],
        rope: int,
        rope_half: int,
        cache: int,
        scale: float,
        soft_cap: float,
        window: int,
        sinks: int,
        bias: int,
        bias_reach: int,
        down: LinearWeight | None,
        router: LinearWeight | None,
        routing: ExpertRouting | None,
        is_interleaved: bool,
        value_size: int,
        pool: ExpertPool | None,
        gathering: Gathering | None,
        columns: list[tuple[int, int]],
        first_id: int,
        num_ids: int,
        numbers: tuple[int, int, int],
    ) -> None:
        """`kind` and its fields: see csrc/cpu/program.hpp. `is_narrow`:
        it computes the wanted tokens' rows alone."""

class Program:
    """`whole`, and what runs instead where no more than half of the hidden states are wanted."""

    def __init__(self, whole: Operations, wanted: Operations, num_positions: int) -> None: ...
    def set_caches(self, caches: list[KVCache], groups: list[int]) -> None: ...
    def forward(
        self,
        token_ids: int,
        positions: int,
        query_start: int,
        context_len: int,
        num_sequences: int,
        num_tokens: int,
        tables: list[tuple[int, int]],
        table_stride: int,
        num_wanted: int,
        adapters: list[Adapter],
        of_token: int,
        placed_tokens: int,
        placed_rows: int,
        num_placed: int,
        placed_width: int,
        rotated_by: int,
        rotations: int,
        num_rotations: int,
        rotated_half: int,
        key_ends: int,
        out: int,
        /,
    ) -> None: ...
