"""engine.yaml: what it says, and what is refused with its line."""

from __future__ import annotations

import pytest

from coral_core.config.engine import load_engine_file
from coral_core.domain.launch import Device, ModelTerms, Runtime
from coral_core.errors import InputError


def write(folder, text):
    path = folder / "engine.yaml"
    path.write_text(text)
    return path


def test_terms_are_keyed_by_model_and_variant_and_relative_paths_by_the_file(tmp_path):
    terms = load_engine_file(
        write(
            tmp_path,
            "device: cpu\nstep_timeout_s: 20\nmodels:\n"
            "  a:\n    bf16: {path: ./tiny, dtype: float32, kv_cache_memory_bytes: 67108864, extra_args: [--seed, '1']}\n"
            "    fp8: {path: org/name, quantization: fp8, kv_cache_memory_bytes: 1, start_limit_s: 7200, env: {X_Y: '1'}}\n",
        )
    )
    assert (terms.device, terms.step_timeout_s, terms.eager) == (Device.CPU, 20, None)
    assert terms.models == {
        ("a", "bf16"): ModelTerms(
            path=str(tmp_path / "tiny"), dtype="float32", kv_cache_memory_bytes=67108864, extra_args=("--seed", "1")
        ),
        ("a", "fp8"): ModelTerms(
            path="org/name", quantization="fp8", kv_cache_memory_bytes=1, start_limit_s=7200, env={"X_Y": "1"}
        ),
    }


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("device: tpu\nmodels: {a: {b: {path: x}}}\n", "yaml:1.*device"),
        ("device: cuda\nmodels: {}\n", "yaml:2"),
        ("device: cuda\nmodels: {a: {}}\n", "a has no variant"),
        ("device: cpu\nmodels: {a: {b: {path: x}}}\n", r"a\.b needs kv_cache_memory_bytes"),
        ("device: cuda\nmodels:\n  a:\n    b: {path: x, dtpye: float16}\n", "yaml:4.*did you mean `dtype`"),
        ("device: cuda\nmodels: {a: {b: {path: ''}}}\n", "path"),
        ("device: cuda\nmodels: {a: {b: {path: x, max_num_seqs: 0}}}\n", "max_num_seqs"),
        (
            "device: cuda\nmodels: {a: {b: {path: x, max_num_seqs: 8, max_num_batched_tokens: 4}}}\n",
            "at least max_num_seqs",
        ),
        ("device: cuda\nmodels: {a: {b: {path: x, env: {lower: '1'}}}}\n", "env"),
        ("device: cuda\nmodels: {a: {b: {path: x, start_limit_s: 0}}}\n", "start_limit_s"),
        ("device: cuda\n", "models"),
        ("device: cuda\nruntimes: [coral]\nmodels: {a: {b: {path: x}}}\n", "runtime coral needs key_file"),
        ("device: cuda\nruntimes: [other]\nmodels: {a: {b: {path: x}}}\n", "yaml:2"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, match):
    with pytest.raises(InputError, match=match):
        load_engine_file(write(tmp_path, text))


def test_runtimes_are_stock_vllm_unless_the_nodes_have_ours(tmp_path):
    models = "models: {a: {b: {path: x}}}\n"
    stock = load_engine_file(write(tmp_path, f"device: cuda\n{models}"))
    ours = load_engine_file(write(tmp_path, f"device: cuda\nruntimes: [vllm, coral]\nkey_file: ./fleet.key\n{models}"))
    assert (stock.runtimes, stock.key_file) == ((Runtime.VLLM,), None)
    assert (ours.runtimes, ours.key_file) == ((Runtime.VLLM, Runtime.CORAL), str(tmp_path / "fleet.key"))
