"""Writes a tiny language model with random weights: what vLLM serves on a machine without a GPU and without downloads.

`python -m coral_core.engine.plugin.tiny_model OUT --layers 8 --seed 0` writes configuration, tokenizer and weights. The same
arguments give the same files. The tokens it answers are noise, but the same noise on every engine: with `float32`, greedy
answers are equal whatever the layout, so that one engine is the oracle of another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

END_OF_TEXT, TURN_BEGINS, TURN_ENDS = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORD_BEGINS = "\u0120"
"""How byte-level tokenizers write a space."""

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention on the CPU takes."""

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
CHAT_TEMPLATE = (
    f"{{% for message in messages %}}{TURN_BEGINS}{{{{ message.role }}}}\n{{{{ message.content }}}}{TURN_ENDS}\n{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{TURN_BEGINS}assistant\n{{% endif %}}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """The shape of a tiny model. ValueError names the dimension that cannot be."""

    layers: int = 8
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 256
    vocab: int = 1024
    context: int = 4096
    seed: int = 0
    arch: str = "qwen3"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < (0 if field.name == "seed" else 1):
                raise ValueError(f"{field.name} is {value}: too small")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim is {self.head_dim}: the CPU's attention takes {', '.join(map(str, HEAD_DIMS))}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are no multiple of {self.kv_heads} kv_heads")
        if self.arch not in ARCHITECTURES:
            raise ValueError(f"arch is {self.arch!r}: known are {', '.join(ARCHITECTURES)}")

    def config(self) -> dict[str, Any]:
        """What `config.json` holds."""
        return {
            "architectures": [ARCHITECTURES[self.arch]],
            "model_type": self.arch,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "dtype": self.dtype,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": SPECIALS.index(TURN_ENDS),
            "pad_token_id": SPECIALS.index(END_OF_TEXT),
        }

    def matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Name and shape (out, in) of each weight that is random."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens", (self.vocab, self.hidden)
        yield "lm_head", (self.vocab, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.self_attn.q_proj", (queries, self.hidden)
            yield f"{at}.self_attn.k_proj", (keys, self.hidden)
            yield f"{at}.self_attn.v_proj", (keys, self.hidden)
            yield f"{at}.self_attn.o_proj", (self.hidden, queries)
            yield f"{at}.mlp.gate_proj", (self.ffn, self.hidden)
            yield f"{at}.mlp.up_proj", (self.ffn, self.hidden)
            yield f"{at}.mlp.down_proj", (self.hidden, self.ffn)

    def norms(self) -> Iterator[tuple[str, int]]:
        """Name and length of each norm's weight; all are one."""
        yield "model.norm", self.hidden
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.input_layernorm", self.hidden
            yield f"{at}.post_attention_layernorm", self.hidden
            if self.arch == "qwen3":
                yield f"{at}.self_attn.q_norm", self.head_dim
                yield f"{at}.self_attn.k_norm", self.head_dim


def write(model: TinyModel, folder: Path) -> None:
    """Write the model into `folder`, made where it is missing; the configuration comes last, so that half a model is none."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, model.vocab)
    write_weights(folder, model)
    config = model.config()
    generation = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level BPE of exactly `vocab` tokens whose merges are stated, not trained; ValueError where that many cannot be."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - the engine's environment only

    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    most = len(tokens) + sum(1 for _ in merges())
    if not len(tokens) <= vocab <= most:
        raise ValueError(f"vocab is {vocab}: from {len(tokens)} to {most} tokens can be made")
    merged = list(itertools.islice(merges(), vocab - len(tokens)))
    tokens += [left + right for left, right in merged]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merged))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_ENDS,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def merges() -> Iterator[tuple[str, str]]:
    """Pairs of tokens to merge, each pair's parts before itself: two letters, three letters, then words' beginnings."""
    letters = string.ascii_lowercase
    pairs = [left + right for left in letters for right in letters]
    yield from zip([WORD_BEGINS] * len(letters), letters, strict=True)
    yield from itertools.product(letters, letters)
    yield from itertools.product(pairs, letters)
    yield from itertools.product([WORD_BEGINS], (pair + letter for pair in pairs for letter in letters))


def write_weights(folder: Path, model: TinyModel) -> None:
    """`model.safetensors`: embeddings from N(0, 1), other matrices from N(0, 0.05^2), drawn in the order of `matrices`."""
    import torch  # noqa: PLC0415 - the engine's environment only
    from safetensors.torch import save_file  # noqa: PLC0415 - the same

    dtype = getattr(torch, model.dtype)
    draw = torch.Generator().manual_seed(model.seed)
    weights = {
        f"{name}.weight": (torch.randn(shape, generator=draw) * (1.0 if name == "model.embed_tokens" else 0.05)).to(
            dtype
        )
        for name, shape in model.matrices()
    }
    weights |= {f"{name}.weight": torch.ones(length, dtype=dtype) for name, length in model.norms()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def main() -> None:
    """Write the model that this process's arguments describe."""
    parser = argparse.ArgumentParser(
        prog="tiny_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    default = TinyModel()
    for field in fields(TinyModel):
        value = getattr(default, field.name)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    folder = arguments.pop("folder")
    try:
        write(TinyModel(**arguments), folder)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
