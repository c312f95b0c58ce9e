"""Model folders with files that were damaged at random: each is used, or refused by a QuireError,
soon and in little memory.

Mutated are valid files, byte by byte and value by value; the values that are put in are those that
readers stumble over.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from safetensors.torch import save_file

from quire.config.engine import EngineConfig
from quire.engine.assembly.preparation import prepare_model
from quire.errors import QuireError
from quire.models.declaration import DecoderSpec
from quire.models.registry import declare
from quire.text.chat import ChatTemplate, encode_chat
from quire.weights.checkpoint import INDEX_NAME, SafetensorsCheckpoint

NUM_DAMAGED = int(os.environ.get("QUIRE_TEST_DAMAGED", "40"))
"""Of each kind of file."""
MAX_SECONDS = 20.0
"""Of processor time, for one folder: what is not bounded takes minutes."""
MAX_MEMORY = 512 << 20

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "dtype": "float32", "eos_token_id": [1, 2], "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
QUANTIZED = CONFIG | {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.down_proj"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "strategy": "group",
                    "group_size": 32,
                    "symmetric": True,
                },
            }
        },
    }
}
FP8 = CONFIG | {
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [16, 16],
        "activation_scheme": "dynamic",
    }
}
VOCAB = [
    "<unk>",
    "<s>",
    "</s>",
    *"abcdefghijklmnopqrstuvwxyz",
    "▁",
    "ab",
    "▁a",
    "<0x0A>",
    "<|im_end|>",
]
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 1, "content": "<s>", "normalized": False, "special": True, **PLAIN},
        {"id": 34, "content": "<|im_end|>", "normalized": True, "special": False, **PLAIN},
    ],
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            {"type": "NFC"},
        ],
    },
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": "\\s+|[a-z]+"},
        "behavior": "Isolated",
        "invert": False,
    },
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    },
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>",
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {token: at for at, token in enumerate(VOCAB)},
        "merges": [["a", "b"], ["▁", "a"]],
    },
}
TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "add_bos_token": True,
    "additional_special_tokens": ["<|im_end|>"],
    "extra_special_tokens": {"image": "<img>"},
    "chat_template": (
        "{% for m in messages %}{{ m.role ~ m['content'][:9] | replace('a', 'b') }}<|im_end|>{% "
        "endfor %}"
    ),
}
GENERATION_CONFIG: dict[str, Any] = {
    "eos_token_id": [1, 2],
    "temperature": 0.7,
    "top_k": 20,
    "max_length": 100,
}

HOSTILE: list[Callable[[random.Random], Any]] = [
    lambda rng: rng.choice(
        [
            None,
            True,
            False,
            "",
            "x",
            [],
            {},
            0,
            -1,
            1.5,
            -0.0,
            2**31,
            -(2**31),
            2**63,
            2**64,
            10**300,
        ]
    ),
    lambda rng: rng.choice([float("nan"), float("inf"), float("-inf"), 1e308, 5e-324]),
    lambda rng: 10 ** rng.choice([4000, 4299]),
    lambda rng: rng.choice(
        [
            "\ud800",
            "a\udfffb",
            "\0",
            "/" * 300,
            "../../etc/passwd",
            "re:(a+)+$",
            "re:((",
            "(x+x+)+y",
        ]
    ),
    lambda rng: "x" * rng.choice([300, 5000, 200_000]),
    lambda rng: [rng.choice([0, 1, "a", None])] * rng.choice([2, 3, 1000, 100_000]),
    lambda rng: _nested(rng.choice([30, 200])),
    lambda rng: {str(i): i for i in range(rng.choice([1, 50, 5000]))},
    lambda rng: [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}] * 9,
    lambda rng: {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"Regex": "a*"}, "content": "aa"}] * 20,
    },
]


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to every value of a document."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(place for key, each in items for place in _places(each, (*path, key)))]


def _mutated(document: Any, rng: random.Random) -> Any:
    """The document with one or two of its values replaced, removed,
    repeated or swapped for others of it."""
    document = copy.deepcopy(document)
    for _ in range(rng.randint(1, 2)):
        places = _places(document)
        place = rng.choice(places)
        if not place:
            return rng.choice(HOSTILE)(rng)
        holder = document
        for key in place[:-1]:
            holder = holder[key]
        kind = rng.randrange(6)
        if kind == 0:
            del holder[place[-1]]
        elif kind == 1:
            other: Any = document
            for key in rng.choice(places):
                other = other[key]
            holder[place[-1]] = copy.deepcopy(other)
        elif kind == 2 and isinstance(holder, list):
            holder[:] = holder * rng.choice([2, 50])
        else:
            holder[place[-1]] = rng.choice(HOSTILE)(rng)
    return document


def _damaged(data: bytes, rng: random.Random) -> bytes:
    """Cut, or with bytes flipped, removed, repeated or put in."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(max(1, len(found)))
        kind = rng.randrange(5)
        if kind == 0:
            return bytes(found[:at])
        if kind == 1 and found:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del found[at : at + rng.randrange(1, 30)]
        elif kind == 3:
            found[at:at] = found[at : at + rng.randrange(1, 200)] * rng.randrange(1, 50)
        else:
            found[at:at] = rng.choice(
                [b"9" * 4000, b"[" * 3000, b"\xff\xfe", b"\\ud800", b'"', b"\0" * 9, b"-", b"e999"]
            )
    return bytes(found)


def _weights(spec: DecoderSpec) -> dict[str, torch.Tensor]:
    return {tensor.name: torch.zeros(tensor.stored_shape) for tensor in spec.tensors}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that nothing is wrong with."""
    folder = tmp_path_factory.mktemp("sound")
    for name, document in {
        "config.json": CONFIG, "tokenizer.json": TOKENIZER,
        "tokenizer_config.json": TOKENIZER_CONFIG,
        "generation_config.json": GENERATION_CONFIG,
    }.items():  # fmt: skip
        (folder / name).write_text(json.dumps(document))
    tensors = _weights(declare(CONFIG))
    names = sorted(tensors)
    weight_map = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file(
            {name: tensors[name] for name in names if weight_map[name] == file}, folder / file
        )
    (folder / INDEX_NAME).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
    (folder / "chat_template.jinja").write_text(TOKENIZER_CONFIG["chat_template"])
    return folder


def _use(folder: Path) -> None:
    """What an engine does with a folder before and while it serves, but for the arithmetic."""
    config = EngineConfig(
        model=str(folder), kv_cache_memory="1MiB", max_num_seqs=2, max_num_batched_tokens=64
    )
    prepared = prepare_model(config, is_for_here=False)
    plan, storage = prepared.planned.plan, prepared.planned.storage
    layout = getattr(storage, "layout", None)
    if prepared.planned.files.gguf is None:
        SafetensorsCheckpoint(folder, plan.spec, layout).close()
    tokenizer = prepared.tokenizer
    assert tokenizer is not None
    for text in ("ab a b", "<|im_end|> x\n", "x" * 200):
        ids = tokenizer.encode(text)
        tokenizer.encode(text, parse_special=True)
        tokenizer.decode(ids[:100])
        for token_id in ids[:50]:
            tokenizer.token_bytes(token_id)
            tokenizer.first_token_piece(token_id)
    if tokenizer.chat_template is not None:
        template = ChatTemplate.from_tokenizer(tokenizer)
        encode_chat(tokenizer, template.render([{"role": "user", "content": "ab<|im_end|>"}]))


def _is_refused(folder: Path, what: str) -> bool:
    """Whether the folder is refused; fails for any other error,
    and for what takes too long or too much."""
    began_s, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    is_refused = False
    try:
        _use(folder)
    except QuireError as error:
        is_refused = True
        assert 0 < len(str(error)) < 3000, what
        assert "\n" not in str(error)[:100], what
    except BaseException as error:
        pytest.fail(f"{what}: {type(error).__name__}: {str(error)[:300]}")
    assert time.process_time() - began_s < MAX_SECONDS, what
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MAX_MEMORY, what
    return is_refused


def _try_all(sound: Path, folder: Path, name: str, damage: Callable[[random.Random], bytes]) -> int:
    """How many were refused of the folders that differ from the sound one by a damaged file."""
    shutil.copytree(sound, folder, dirs_exist_ok=True)
    num_refused = 0
    for seed in range(NUM_DAMAGED):
        (folder / name).write_bytes(damage(random.Random(seed)))
        num_refused += _is_refused(folder, f"{name}, seed {seed}")
    return num_refused


def test_the_sound_folder_is_used(sound: Path) -> None:
    _use(sound)


DOCUMENTS: dict[str, tuple[str, Any]] = {
    "config": ("config.json", CONFIG),
    "quantized": ("config.json", QUANTIZED),
    "fp8": ("config.json", FP8),
    "tokenizer": ("tokenizer.json", TOKENIZER),
    "tokenizer config": ("tokenizer_config.json", TOKENIZER_CONFIG),
    "generation config": ("generation_config.json", GENERATION_CONFIG),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_documents_with_hostile_values_are_used_or_refused(
    sound: Path, tmp_path: Path, kind: str
) -> None:
    name, document = DOCUMENTS[kind]
    num_refused = _try_all(
        sound, tmp_path, name, lambda rng: json.dumps(_mutated(document, rng)).encode()
    )
    assert 0 < num_refused <= NUM_DAMAGED


@pytest.mark.slow
def test_an_index_with_hostile_values_is_used_or_refused(sound: Path, tmp_path: Path) -> None:
    index = json.loads((sound / INDEX_NAME).read_bytes())
    assert (
        _try_all(sound, tmp_path, INDEX_NAME, lambda rng: json.dumps(_mutated(index, rng)).encode())
        > 0
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", INDEX_NAME],
)
def test_damaged_bytes_are_used_or_refused(sound: Path, tmp_path: Path, name: str) -> None:
    data = (sound / name).read_bytes()
    assert _try_all(sound, tmp_path, name, lambda rng: _damaged(data, rng)) > 0


@pytest.mark.slow
def test_damaged_headers_of_safetensors_are_refused_or_used(sound: Path, tmp_path: Path) -> None:
    name = "model-1.safetensors"
    data = (sound / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])

    def damage(rng: random.Random) -> bytes:
        if rng.randrange(2):
            return _damaged(data[: 8 + length], rng) + data[8 + length :]
        mutated = json.dumps(_mutated(header, rng)).encode()
        return len(mutated).to_bytes(8, "little") + mutated + data[8 + length :]

    assert _try_all(sound, tmp_path, name, damage) > NUM_DAMAGED // 2


GGUF_METADATA: dict[str, Any] = {
    "general.architecture": "llama", "llama.embedding_length": 32, "llama.block_count": 1,
    "llama.context_length": 64, "llama.feed_forward_length": 32, "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0, "llama.rope.dimension_count": 8,
    "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": VOCAB,
    "tokenizer.ggml.scores": [0.0] * len(VOCAB),
    "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (len(VOCAB) - 4), 3],
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": TOKENIZER_CONFIG["chat_template"],
}  # fmt: skip


def _gguf_tensors() -> dict[str, tuple[tuple[int, ...], int, bytes]]:
    vocab = len(VOCAB)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, 32),
        "output_norm.weight": (32,),
        "output.weight": (vocab, 32),
    }
    for name, shape in {
        "attn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32),
        "attn_output": (32, 32), "ffn_norm": (32,), "ffn_gate": (32, 32), "ffn_up": (32, 32),
        "ffn_down": (32, 32),
    }.items():  # fmt: skip
        shapes[f"blk.0.{name}.weight"] = shape
    return {name: (shape, 0, bytes(4 * math.prod(shape))) for name, shape in shapes.items()}


@pytest.mark.slow
def test_gguf_files_with_hostile_metadata_are_used_or_refused(tmp_path: Path) -> None:
    tensors = _gguf_tensors()
    path = write_gguf(tmp_path / "model.gguf", GGUF_METADATA, tensors)
    _use(path)
    data, num_refused = path.read_bytes(), 0
    for seed in range(2 * NUM_DAMAGED):
        rng = random.Random(seed)
        if seed % 2:
            path.write_bytes(_damaged(data[: len(data) // 4], rng) + data[len(data) // 4 :])
        else:
            metadata = dict(GGUF_METADATA)
            key = rng.choice(list(metadata))
            number, text = (
                rng.choice([0, 1, 3, 2**31 - 1]),
                rng.choice(["", "gpt2", "qwen2", "gemma3", "{{ 9**9**9 }}", "x" * 9999]),
            )
            metadata[key] = rng.choice(
                [number, text, 0.5, True, [number] * 3, [text, text, "b"], [0.5] * len(VOCAB)]
            )
            write_gguf(path, metadata, tensors)
        num_refused += _is_refused(path, f"GGUF, seed {seed}")
    assert num_refused > NUM_DAMAGED // 2


TENFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}

NAMED: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "a shape of 400,000 dimensions": ("safetensors", lambda header: {"a": _entry([1] * 400_000)}),
    "a shape of numbers of 4,000 digits": (
        "safetensors",
        lambda header: {"a": _entry([10**4000] * 60)},
    ),
    "a shape of 60 numbers below 2^62": ("safetensors", lambda header: {"a": _entry([2**61] * 60)}),
    "a subword prefix": (  # which the library cuts off in the middle of a character, in a panic
        "tokenizer.json",
        lambda document: _put(
            _put(document, "x", "model", "continuing_subword_prefix"),
            [["a", "▁"]],
            "model",
            "merges",
        ),
    ),
    "a lone surrogate": (
        "tokenizer_config.json",
        lambda document: document | {"eos_token": "\ud800"},
    ),
    "a shard's long name": (
        INDEX_NAME,
        lambda document: {"weight_map": {"a": "x" * 5000 + ".safetensors"}},
    ),
    "nine chained replacements": (
        "tokenizer.json",
        lambda document: (
            document | {"normalizer": {"type": "Sequence", "normalizers": [TENFOLD] * 9}}
        ),
    ),
    "chained replacements of what decodes": (
        "tokenizer.json",
        lambda document: document | {"decoder": {"type": "Sequence", "decoders": [TENFOLD] * 9}},
    ),
    "a pattern without end": (
        "config.json",
        lambda document: _put(
            copy.deepcopy(QUANTIZED), ["re:(.+)+X"] * 50, "quantization_config", "ignore"
        ),
    ),
    "blocks of nothing": (
        "config.json",
        lambda document: _put(
            copy.deepcopy(FP8), [0, 0], "quantization_config", "weight_block_size"
        ),
    ),
    "a prefix of a million tokens": (
        "tokenizer.json",
        lambda document: _put(
            document, [1] * 100_000, "post_processor", "special_tokens", "<s>", "ids"
        ),
    ),
}


def _entry(shape: list[int]) -> dict[str, Any]:
    return {"dtype": "U8", "shape": shape, "data_offsets": [0, 1]}


def _put(document: Any, value: Any, *place: str) -> Any:
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return document


@pytest.mark.parametrize("what", NAMED)
def test_what_once_took_for_ever_or_ended_the_process_is_refused(
    sound: Path, tmp_path: Path, what: str
) -> None:
    file, change = NAMED[what]
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    if file == "safetensors":
        header = json.dumps(change({})).encode()
        (tmp_path / "model-1.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + b"\0"
        )
    else:
        (tmp_path / file).write_text(json.dumps(change(json.loads((sound / file).read_bytes()))))
    assert _is_refused(tmp_path, what)
