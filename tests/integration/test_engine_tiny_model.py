"""The tiny model, made by the engine's interpreter."""

from __future__ import annotations

import json
import subprocess

PROGRAM = "coral_core.engine.plugin.tiny_model"


def made(engine_python, repository, *arguments) -> subprocess.CompletedProcess[str]:
    command = [engine_python, "-m", PROGRAM, *map(str, arguments)]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=120, check=False)


def test_the_same_arguments_give_the_same_files_and_another_seed_other_weights(
    engine_python, tiny_model, repository, tmp_path
):
    for folder, seed in (("again", 0), ("other", 1)):
        assert made(engine_python, repository, tmp_path / folder, "--seed", seed).returncode == 0
    for path in tiny_model.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    differing = {p.name for p in tiny_model.iterdir() if (tmp_path / "other" / p.name).read_bytes() != p.read_bytes()}
    assert differing == {"model.safetensors"}


def test_the_configuration_says_what_was_asked_and_the_tokenizer_has_as_many_tokens(
    engine_python, repository, tmp_path
):
    assert made(engine_python, repository, tmp_path, "--layers", 3, "--vocab", 1500, "--arch", "llama").returncode == 0
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (config["num_hidden_layers"], config["vocab_size"], config["model_type"]) == (3, 1500, "llama")
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert sorted(tokenizer["model"]["vocab"].values()) == list(range(1500))


def test_a_shape_that_cannot_be_is_refused_and_writes_no_model(engine_python, repository, tmp_path):
    done = made(engine_python, repository, tmp_path, "--head-dim", 33)
    assert done.returncode == 2
    assert "head_dim is 33" in done.stderr
    assert not list(tmp_path.iterdir())
