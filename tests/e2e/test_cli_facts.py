"""Commands that show facts: catalogue, models, workload, scenarios, doctor."""

from __future__ import annotations

import json

import pytest

from coral_core.cli.entry import refuse_foreign_packages, run
from coral_core.config.scenario import scenario_text
from coral_core.errors import InputError


@pytest.fixture
def coral(tmp_path, monkeypatch, capsys):
    """Run a command line in an empty folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize(
    "arguments",
    [
        ("catalog", "list"),
        ("catalog", "show", "paper-extended"),
        ("catalog", "show", "aws-real", "--region", "us-east-1"),
        ("catalog", "gpus"),
        ("models", "list"),
        ("models", "show", "gpt-oss-20b"),
        ("scenario", "list"),
        ("scenario", "show", "tiny"),
        ("doctor",),
    ],
)
def test_each_command_speaks_to_people_and_to_machines(coral, arguments):
    code, out, _ = coral(*arguments)
    assert code == 0
    assert out.strip()
    code, out, _ = coral(*arguments, "--json")
    assert code == 0
    assert json.loads(out)


def test_a_price_that_is_not_known_is_not_zero(coral):
    _, out, _ = coral("catalog", "show", "aws-real", "--json")
    configs = {config["name"]: config for config in json.loads(out)["configs"]}
    assert configs["p5e.48xlarge"]["prices"] == []
    assert all(price["price_usd_per_h"] > 0 for config in configs.values() for price in config["prices"])


def test_spot_discounts_are_shown_where_they_are_known(coral):
    _, out, _ = coral("catalog", "show", "aws-real", "--json")
    configs = {config["name"]: config["spot"] for config in json.loads(out)["configs"]}
    assert configs["p5.4xlarge"] == []
    ohio = next(fact for fact in configs["g6e.xlarge"] if fact["region"] == "us-east-2")
    assert ohio["interrupted_frac_per_month_to"] is None  # an open range
    _, out, _ = coral("catalog", "show", "aws-real", "--region", "us-east-2")
    row = next(line for line in out.splitlines() if line.startswith("g6e.xlarge"))
    assert f"{ohio['saving_frac']:.0%}" in row
    assert "above 20%" in row
    assert "Spot: as of 2025-06-01" in out
    _, out, _ = coral("catalog", "show", "paper-core", "--region", "us-east-2")
    assert "Spot" not in out


def test_a_model_is_added_from_a_hugging_face_config_and_listed(coral, tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    code, out, err = coral("models", "add", path, "--name", "little", "--json")
    assert code == 0, err
    assert json.loads(out)["total_params"] == pytest.approx(1.24e9, rel=0.01)
    _, out, _ = coral("models", "list", "--json")
    assert "little" in {model["name"] for model in json.loads(out)}
    code, out, _ = coral("models", "show", "little")
    assert code == 0
    assert "32 heads, 8 KV" in out
    folder = tmp_path / "Folder-1B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    code, out, _ = coral("models", "add", folder / "config.json")
    assert code == 0
    assert "added folder-1b:" in out
    path.write_text(json.dumps({**config, "_name_or_path": "org/Own-1B"}))
    code, out, _ = coral("models", "add", path, "--json")
    assert json.loads(out)["name"] == "own-1b"
    path.write_text(json.dumps({**config, "num_hidden_layers": -1}))
    code, _, err = coral("models", "add", path, "--name", "broken")
    assert code == 2
    assert "num_hidden_layers" in err


def test_a_trace_is_summarised_and_scaled(coral, tmp_path):
    path = tmp_path / "trace.csv"
    rows = "\n".join(f"{i},100,{20 + i % 3}" for i in range(11))
    path.write_text(f"arrival_s,input_tokens,output_tokens\n{rows}\n")
    code, out, _ = coral("workload", "summarize", path, "--json")
    assert code == 0
    summary = json.loads(out)
    assert summary["mean_input_tokens"] == 100
    assert summary["prefill_tokens_per_s"] == pytest.approx(summary["requests_per_s"] * 100)
    _, out, _ = coral("workload", "summarize", path, "--requests-per-s", "5", "--json")
    assert json.loads(out)["requests_per_s"] == pytest.approx(5)
    code, out, _ = coral("workload", "summarize", path)
    assert code == 0
    assert "mean_input_tokens" in out
    assert "burstiness: standard deviation over mean of the gaps" in out


def test_a_scenario_is_copied_once_and_loads(coral, tmp_path):
    code, out, _ = coral("scenario", "copy", "tiny", "mine.yaml")
    assert code == 0
    assert "mine.yaml" in out
    assert (tmp_path / "mine.yaml").read_text() == scenario_text("tiny")
    code, out, _ = coral("scenario", "show", "./mine.yaml", "--json")
    assert json.loads(out)["name"] == "tiny"
    for arguments, words in (
        (("tiny", "mine.yaml"), "there already"),
        (("tinny", "other.yaml"), "did you mean tiny"),
        (("tiny", "other.txt"), "other.yaml"),
        (("tiny", "no/folder.yaml"), "cannot be written"),
    ):
        code, out, err = coral("scenario", "copy", *arguments)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1


def test_tables_fit_a_hundred_columns(coral):
    for arguments in (("scenario", "list"), ("models", "list"), ("catalog", "list"), ("catalog", "show", "paper-core")):
        _, out, _ = coral(*arguments)
        rule = next(line for line in out.splitlines() if line.startswith("─"))
        assert len(rule) <= 100, arguments


def test_doctor_says_where_the_store_comes_from_and_how_to_refresh_prices(coral, tmp_path, monkeypatch):
    def store_detail(*arguments):
        _, out, _ = coral("doctor", *arguments, "--json")
        return next(finding["detail"] for finding in json.loads(out) if finding["group"] == "store")

    assert "default" in store_detail()
    assert "--store" in store_detail("--store", (tmp_path / "a").as_uri())
    monkeypatch.setenv("CORAL_STORE", (tmp_path / "b").as_uri())
    assert "CORAL_STORE" in store_detail()
    monkeypatch.setattr("coral_core.cli.doctor.STALE_PRICE_DAYS", -1)
    _, out, _ = coral("doctor")
    assert "Stale prices: bring the dated tables" in out
    monkeypatch.setattr("coral_core.cli.doctor.STALE_PRICE_DAYS", 100_000)
    _, out, _ = coral("doctor")
    assert "Stale prices" not in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("models", "show", "nope"),
        ("catalog", "show", "nope"),
        ("catalog", "show", "paper-core", "--region", "mars"),
        ("scenario", "show", "nope"),
    ],
)
def test_unknown_names_are_one_line_and_exit_code_2(coral, arguments):
    code, out, err = coral(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


def test_doctor_fails_where_the_store_does(coral, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    code, out, _ = coral("doctor", "--store", f"file://{blocked}", "--json")
    assert code == 1
    assert any(finding["state"] == "failed" for finding in json.loads(out))


def test_doctor_says_that_a_prefect_server_does_not_answer(coral, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    code, out, _ = coral("doctor", "--json")
    assert code == 1
    assert any(f["what"] == "Prefect" and f["state"] == "failed" for f in json.loads(out))


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense", "127.0.0.1:999999"])
def test_doctor_says_that_a_ray_cluster_does_not_answer(coral, monkeypatch, address):
    monkeypatch.setenv("CORAL_RAY_ADDRESS", address)
    code, out, _ = coral("doctor", "--json")
    assert code == 1
    assert any(f["what"] == "Ray" and f["state"] == "failed" for f in json.loads(out))


def test_foreign_packages_of_our_names_are_refused(tmp_path, monkeypatch):
    foreign = tmp_path / "tasks"
    foreign.mkdir()
    (foreign / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "tasks", raising=False)
    with pytest.raises(InputError, match="tasks"):
        refuse_foreign_packages()
