"""A small random Qwen2.5-VL, and what transformers makes of it."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

IMAGE, START, END = 300, 301, 302       # token ids of the placeholder, and around it
SECTIONS = [2, 3, 3]
TEXT = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTIONS}}
VISION = {"depth": 3, "hidden_size": 64, "intermediate_size": 84, "num_heads": 4, "out_hidden_size": 64,
          "fullatt_block_indexes": [1], "window_size": 56, "patch_size": 14, "spatial_merge_size": 2,
          "temporal_patch_size": 2}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}")
PIXELS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 40}


def written(directory: Path) -> Any:
    """Writes a random model to a directory, and returns transformers'."""
    torch.manual_seed(0)
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT, vision_config=VISION, image_token_id=IMAGE, vision_start_token_id=START,
        vision_end_token_id=END, video_token_id=303, eos_token_id=2, bos_token_id=1)
    config.text_config.eos_token_id = 2
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():   # weights of 0.02 give near equal logits
        for name, each in model.named_parameters():
            if each.ndim > 1: each.mul_(4.0)
            elif name.endswith("bias"): each.normal_(0, 0.1)
    model.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    add_tokenizer(directory)
    return model


def add_tokenizer(directory: Path) -> None:
    """A tokenizer of single bytes with the tokens around images, and a template as Qwen2.5-VL's."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fillers = {f"<{i}>": i for i in range(len(letters), IMAGE)}
    tokenizer = Tokenizer(models.BPE(letters | fillers, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"])
    assert tokenizer.token_to_id("<|image_pad|>") == IMAGE
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def picture(seed: int, height: int = 90, width: int = 130) -> np.ndarray:
    """RGB bytes of a smooth image."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / 20.0
    waves = [np.sin(y * a + x * b + c) for a, b, c in rng.uniform(0, 3, (3, 3))]
    return ((np.stack(waves, -1) + 1) * 127.5).astype(np.uint8)


def processed(images: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """What transformers' image processor makes of images."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    made = Qwen2VLImageProcessorPil(**PIXELS)(images=images, return_tensors="pt")
    return {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}


def greedy(model: Any, prompt: list[int], images: list[np.ndarray], count: int) -> list[int]:
    """transformers' next tokens; a placeholder stands for each image."""
    return scored(model, prompt, images, count)[0]


def scored(model: Any, prompt: list[int], images: list[np.ndarray],
           count: int) -> tuple[list[int], list[float]]:
    """The same, with their log probabilities."""
    ids, more = list[int](), dict[str, Any]()
    if images: more = processed(images)
    grids = iter(more["image_grid_thw"].tolist()) if images else iter(())
    for token in prompt:
        ids += [token] * (int(np.prod(next(grids))) // 4) if token == IMAGE else [token]
    given = torch.tensor([ids])
    if images: more["mm_token_type_ids"] = (given == IMAGE).int()
    with torch.no_grad():
        made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count,
                              do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True,
                              return_dict_in_generate=True, **more)
    tokens = made.sequences[0, len(ids):].tolist()
    logprobs = [float(each[0].log_softmax(-1)[token])
                for each, token in zip(made.logits, tokens, strict=True)]
    return tokens, logprobs
