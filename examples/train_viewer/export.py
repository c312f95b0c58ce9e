"""Write a trained viewer as a Hugging Face folder, the weights in bfloat16.

python -m examples.train_viewer.export --run build/viewer --out build/viewer/model
"""

import argparse
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from examples.train_storyteller.export import write_json

from .conversations import CHAT_TEMPLATE, END_OF_TEXT, MAX_LEN, TURN_END
from .model import MEAN, STD
from .scenes import IMAGE_SIZE, NUM_PATCHES

_BICUBIC = 3
PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "processor_class": "LlavaProcessor",
    "do_resize": True,
    "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    "resample": _BICUBIC,
    "do_center_crop": False,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": list(MEAN),
    "image_std": list(STD),
    "do_convert_rgb": True,
}
"""A picture is squeezed into a square, so that nothing of it is cut off."""
GENERATION = {"do_sample": False, "eos_token_id": [2, 0], "pad_token_id": 0}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": MAX_LEN,
    "bos_token": None,
    "eos_token": TURN_END,
    "pad_token": END_OF_TEXT,
    "unk_token": None,
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}


def write_folder(
    model: transformers.LlavaForConditionalGeneration, tokenizer: Path, out: Path
) -> None:
    """Write everything that loading it needs. The output projection is the embedding, so it is
    stored once."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in model.named_parameters()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors makes it readable for its owner only
    config = model.config.to_diff_dict() | {
        "architectures": ["LlavaForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_seq_length": NUM_PATCHES,
    }
    config.pop("transformers_version", None)
    write_json(out / "config.json", config)
    write_json(out / "preprocessor_config.json", PROCESSOR)
    write_json(out / "generation_config.json", GENERATION)
    write_json(out / "tokenizer_config.json", TOKENIZER_CONFIG)
    shutil.copyfile(tokenizer, out / "tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("build/viewer"))
    parser.add_argument("--out", type=Path, default=Path("build/viewer/model"))
    args = parser.parse_args()
    model = transformers.LlavaForConditionalGeneration.from_pretrained(
        args.run, dtype=torch.float32
    )
    write_folder(model, args.run / "tokenizer.json", args.out)


if __name__ == "__main__":
    main()
