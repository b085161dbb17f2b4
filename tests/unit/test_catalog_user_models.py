"""The user's own models: what is saved is loaded, names never clash silently, broken files are named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from coral_core.catalog import load_models, save_user_model
from coral_core.catalog.user_models import read_user_model
from coral_core.errors import InputError


def own(name: str = "mine", of: str = "phi-4", **changes: object):
    return dataclasses.replace(load_models()[of], name=name, **changes)


@pytest.mark.parametrize("of", sorted(load_models()))
def test_what_is_saved_is_loaded(tmp_path, of):
    folder = tmp_path / "a" / "models"
    shape = own(of=of)
    assert save_user_model(shape, folder) == folder / "mine.json"
    assert load_models(folder) == load_models() | {"mine": shape}
    assert [path.name for path in folder.iterdir()] == ["mine.json"]


def test_a_folder_that_is_absent_holds_none(tmp_path):
    assert load_models(tmp_path / "absent") == load_models()


def test_nothing_is_overwritten(tmp_path):
    path = save_user_model(own(), tmp_path)
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"mine.json: model 'mine' is there already"):
        save_user_model(own(layers=80), tmp_path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_name_of_the_package_is_refused_when_saving_and_when_loading(tmp_path):
    with pytest.raises(InputError, match=r"phi-4.json: model 'phi-4' is one of the package's own"):
        save_user_model(own("phi-4"), tmp_path)
    path = save_user_model(own(), tmp_path)
    content = path.read_text().replace('"name": "mine"', '"name": "phi-4"')
    (tmp_path / "phi-4.json").write_text(content)
    with pytest.raises(InputError, match=r"phi-4.json: model 'phi-4' is one of the package's own \(its models.csv\)"):
        load_models(tmp_path)


@pytest.mark.parametrize("name", ["../escape", "Upper", "", "a/b", "x" * 65, ".hidden"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path, name):
    with pytest.raises(InputError, match="is not a lower-case name"):
        save_user_model(own(name), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"published_params": float("nan")}, "published_params is nan"),
        ({"default_variant": "fp9"}, "default_variant 'fp9' is not among variants bf16"),
        ({"variants": {}}, r"default_variant 'bf16' is not among variants \(none\)"),
    ],
)
def test_an_impossible_shape_is_not_saved(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        save_user_model(own(**changes), tmp_path)
    assert list(tmp_path.iterdir()) == []


def edited(tmp_path: Path, old: str, new: str) -> Path:
    path = save_user_model(own(of="gpt-oss-20b"), tmp_path)
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"layers": 24', '"layers": "24"', r"mine.json: model.layers: Input should be a valid integer"),
        ('"layers": 24', '"layers": true', r"model.layers: Input should be a valid integer"),
        ('"layers": 24', '"layers": -24', r"mine.json: layers is -24"),
        ('"layers": 24', '"layers": 24, "layers": 25', r"mine.json: key 'layers' is there twice"),
        ('"layers": 24', f'"layers": {"7" * 401}', r"mine.json: (layers is 7+\.\.\.7+, must|model.layers: )"),
        ('"layers": 24', f'"layers": {"7" * 5001}', r"mine.json: "),
        ('"layers": 24', '"leyers": 24', r"model.layers: Field required"),
        ('"top_k": 4', '"top_k": 4, "topk": 5', r"model.moe.topk: Unexpected keyword argument"),
        ('"weight_bits": 16.0', '"weight_bits": NaN', r"weight_bits: Input should be a finite number"),
        ('"compute_dtype": "bf16"', '"compute_dtype": "fp9"', r"variants.mxfp4 computes in fp9; known: bf16"),
        ('"name": "bf16"', '"name": "fp16"', r"variants.bf16 carries the name 'fp16'"),
        ('"name": "mine"', '"name": "yours"', r"mine.json: holds model 'yours' \(name the file yours.json"),
        ('"format": 1', '"format": 2', r"format: Input should be 1"),
        ('"format": 1,', "", r"format: Field required"),
        ('"as_of": "', '"as_of": "x', r"model.as_of: Input should be a valid date"),
        ('"layers": 24', '"layers": 24,\n,', r"mine.json:\d+: not valid JSON"),
    ],
)
def test_a_broken_file_is_named_with_its_key(tmp_path, old, new, message):
    path = edited(tmp_path, old, new)
    for read in (lambda: read_user_model(path), lambda: load_models(tmp_path)):
        with pytest.raises(InputError, match=message):
            read()


def test_a_truncated_and_an_undecodable_file_are_named(tmp_path):
    path = save_user_model(own(), tmp_path)
    path.write_text(path.read_text()[:200])
    with pytest.raises(InputError, match=r"mine.json:\d+: not valid JSON"):
        load_models(tmp_path)
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"mine.json: cannot be read"):
        load_models(tmp_path)


def test_places_that_cannot_hold_models_are_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="is not a directory"):
        load_models(file)
    for folder in (file, file / "below"):
        with pytest.raises(InputError, match="cannot be written"):
            save_user_model(own(), folder)


def test_the_file_says_its_format(tmp_path):
    content = json.loads(save_user_model(own(), tmp_path).read_text())
    assert content["format"] == 1
    assert content["model"]["as_of"] == "2026-11-29"
