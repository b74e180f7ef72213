# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Makes the tiny models, without any download: ``python -m omni_tiny_models.build FOLDER``.

Deterministic: weights come from a fixed seed. A model that is there already is left alone,
unless the code in this file or the vocabulary has changed since.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from omni_tiny_models import vocabulary

_STAMP = "made-by"

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # "Ġ" is how this tokenizer family writes the space before a word. Without merges no
    # text is ever encoded to a word: words are the model's alone.
    words = [f"Ġ{word}" for word in (*vocabulary.WORDS, *vocabulary.SLOW_WORDS)]
    tokens = enumerate((*vocabulary.BYTE_TOKENS, *words))
    tokenizer = Tokenizer(models.BPE({token: i for i, token in tokens}, merges=[]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in vocabulary.SPECIALS]
    )
    assert tokenizer.get_vocab_size() == vocabulary.SIZE
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=vocabulary.CHAT_END,
        pad_token=vocabulary.END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def make_ar(folder: Path) -> None:
    """A Qwen2 of two layers with random weights, its tokenizer and a chat template."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    _save_tokenizer(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary.SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        # CPU attention kernels want heads of 64.
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocabulary.CHAT_END_ID,
        pad_token_id=vocabulary.END_OF_TEXT_ID,
        torch_dtype="float32",
        # Weights of usual size make a greedy answer repeat one word for ever.
        initializer_range=0.5,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    model.config.architectures = ["TinyOmniModel"]
    model.save_pretrained(folder)


def make_diffusion(folder: Path) -> None:
    """The tiny diffusion pipeline's index, configuration and random weights."""
    import torch
    from safetensors.torch import save_file

    from omni_tiny_models.transformer import TinyTransformer

    torch.manual_seed(0)
    sizes = {"channels": 4, "width": 64, "heads": 2, "layers": 2}
    index = {"_class_name": "TinyDiffusionPipeline", "transformer": ["omni_tiny_models", "T"]}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps({"sizes": sizes}, indent=2))
    save_file(
        TinyTransformer(**sizes).state_dict(),
        folder / "transformer" / "diffusion_pytorch_model.safetensors",
    )


def make_ar_diffusion(folder: Path) -> None:
    """Both models in one folder, for a pipeline that has a stage of each."""
    make_ar(folder)
    make_diffusion(folder)


MODELS: dict[str, Callable[[Path], None]] = {
    "ar": make_ar,
    "diffusion": make_diffusion,
    "ar-diffusion": make_ar_diffusion,
}


def _version() -> str:
    here = Path(__file__).parent
    sources = [here / name for name in ("build.py", "vocabulary.py", "transformer.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def make_all(root: Path) -> None:
    """Make every model that is missing or out of date under ``root``."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    for name, make in MODELS.items():
        folder = root / name
        stamp = folder / _STAMP
        if stamp.is_file() and stamp.read_text() == _version():
            print(f"{folder}: up to date")
            continue
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(folder)
        stamp.write_text(_version())
        print(f"{folder}: made")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m omni_tiny_models.build FOLDER")
    make_all(Path(sys.argv[1]))
