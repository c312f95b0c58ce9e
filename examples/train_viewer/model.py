"""The network: Transformers' LLaVA (Liu et al., arXiv:2310.03744) with a tower and a decoder small
enough to be trained on a processor, and a picture's pixels as it reads them."""

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor

from .conversations import IMAGE, MAX_LEN, SPECIAL_TOKENS, VOCABULARY_SIZE
from .scenes import IMAGE_SIZE, NUM_PATCHES, PATCH_SIZE

HIDDEN_SIZE, NUM_HEADS, NUM_LAYERS, MLP_SIZE = 128, 4, 4, 352
MEAN = STD = (0.5, 0.5, 0.5)


def new_model() -> transformers.LlavaForConditionalGeneration:
    """Return a network of 1.7 million parameters with random weights."""
    text = transformers.LlamaConfig(
        vocab_size=VOCABULARY_SIZE, hidden_size=HIDDEN_SIZE, intermediate_size=MLP_SIZE,
        num_hidden_layers=NUM_LAYERS, num_attention_heads=NUM_HEADS, num_key_value_heads=2,
        max_position_embeddings=MAX_LEN, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    vision = transformers.CLIPVisionConfig(
        hidden_size=HIDDEN_SIZE, intermediate_size=4 * HIDDEN_SIZE, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS, image_size=IMAGE_SIZE, patch_size=PATCH_SIZE,
        hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=SPECIAL_TOKENS.index(IMAGE),
        vision_feature_layer=-1, vision_feature_select_strategy="default",
        image_seq_length=NUM_PATCHES, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config)
    # It is behind the states that LLaVA takes.
    model.model.vision_tower.post_layernorm.requires_grad_(False)
    return model


def pixels_of(image: Image.Image) -> Tensor:
    """Return an image of any size as [3, IMAGE_SIZE, IMAGE_SIZE], scaled to -1 to 1."""
    small = image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
    values = torch.from_numpy(np.asarray(small, np.float32) / 255.0)
    return (values.permute(2, 0, 1) - MEAN[0]) / STD[0]
