"""Trace readers: each public format, and every way a file can be wrong, named by file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from coral_core.errors import InputError
from coral_core.workload import length_statistics, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:51,879,55
"""
PLAIN = "arrival_s,input_tokens,output_tokens\n0.0,374,44\n4.315,396,109\n"
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,0,0,0,API log
118,GPT-4,417,276,693,Conversation log
120,GPT-4,90,0,90,API log
"""
MOONCAKE = """{"timestamp": 500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}

{"timestamp": 3500.5, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}
"""


def write(tmp_path: Path, content: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode())
    return path


def test_azure_stamps_become_seconds_from_the_first_request(tmp_path):
    trace = read_trace(write(tmp_path, AZURE))
    np.testing.assert_allclose(trace.arrival_s, [0, 4.314579, 64.31941], rtol=0, atol=1e-6)
    assert trace.input_tokens.tolist() == [374, 396, 879]
    assert trace.output_tokens.tolist() == [44, 109, 55]
    assert (trace.name, trace.dropped, trace.source) == ("trace", 0, "trace.csv (azure trace)")


def test_azure_stamps_may_carry_a_zone_and_columns_may_stand_in_any_order(tmp_path):
    text = "ContextTokens,TIMESTAMP,GeneratedTokens\n10,2024-05-10 00:00:00.009930+00:00,2\n20,2024-05-10 00:00:01+00:00,3\n"
    trace = read_trace(write(tmp_path, text))
    np.testing.assert_allclose(trace.arrival_s, [0, 0.99007], atol=1e-9)
    assert trace.input_tokens.tolist() == [10, 20]


def test_seconds_are_read_as_they_are(tmp_path):
    assert read_trace(write(tmp_path, PLAIN), "azure").arrival_s.tolist() == [0, 4.315]


def test_burstgpt_failures_are_left_out_counted_and_reported(tmp_path):
    trace = read_trace(write(tmp_path, BURSTGPT))
    assert trace.arrival_s.tolist() == [0, 113]
    assert trace.input_tokens.tolist() == [472, 417]
    assert trace.dropped == 2
    assert "2 of 4 requests failed" in trace.source


def test_burstgpt_failures_with_a_prompt_can_be_kept(tmp_path):
    trace = read_trace(write(tmp_path, BURSTGPT), keep_failures=True)
    assert trace.output_tokens.tolist() == [18, 276, 0]
    assert trace.dropped == 1


def test_burstgpt_of_failures_only_is_refused(tmp_path):
    text = "".join(BURSTGPT.splitlines(keepends=True)[i] for i in (0, 2, 4))
    with pytest.raises(InputError, match="holds failed requests only"):
        read_trace(write(tmp_path, text))


def test_burstgpt_with_later_columns(tmp_path):
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,,1.5,ChatGPT,472,18,490,API log\n"
    )
    assert read_trace(write(tmp_path, text)).input_tokens.tolist() == [472]


def test_mooncake_milliseconds_become_seconds(tmp_path):
    trace = read_trace(write(tmp_path, MOONCAKE, "trace.jsonl"))
    np.testing.assert_allclose(trace.arrival_s, [0, 3.0005])
    assert trace.input_tokens.tolist() == [6758, 7322]
    assert trace.output_tokens.tolist() == [500, 490]


@pytest.mark.parametrize("content", [AZURE, BURSTGPT, MOONCAKE])
def test_windows_line_ends_a_byte_order_mark_and_compression_change_nothing(tmp_path, content):
    plain = read_trace(write(tmp_path, content, "a"))
    dressed = ("\ufeff" if content is not MOONCAKE else "") + content.replace("\n", "\r\n")
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(dressed.encode()))
    packed = read_trace(path)
    np.testing.assert_array_equal(packed.arrival_s, plain.arrival_s)
    np.testing.assert_array_equal(packed.input_tokens, plain.input_tokens)


def azure(line: str) -> str:
    return AZURE.replace("2023-11-16 18:15:50.9951690,396,109", line)


def plain(line: str) -> str:
    return PLAIN.replace("4.315,396,109", line)


def mooncake(**fields: object) -> str:
    good = {"timestamp": 0, "input_length": 5, "output_length": 3}
    bad = {key: value for key, value in (good | {"timestamp": 9} | fields).items() if value is not ...}
    return f"{json.dumps(good)}\n\n{json.dumps(bad)}\n{json.dumps(good | {'timestamp': 99})}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"trace:1: is empty"),
        ("\n" + AZURE, r"trace:1: is empty, or starts with an empty line"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", r"trace: holds no requests"),
        ("a,b,c\n1,2,3\n", r"trace:1: columns a,b,c are those of no known trace \(known: azure: TIMESTAMP"),
        ("374,44\n375,44\n", r"are those of no known trace"),
        (AZURE.replace("ContextTokens", "ContextTokens,ContextTokens"), r"column 'ContextTokens' is there twice"),
        (azure("2023-11-16 18:15:50,396"), r"trace:3: Expected 3 columns, got 2"),
        (azure("2023-11-16 18:15:50,396,1O9"), r"trace:3: GeneratedTokens: invalid value '1O9'"),
        (azure("2023-11-16 18:15:50,396.5,109"), r"trace:3: ContextTokens: invalid value '396.5'"),
        (azure("2023-11-16 18:15:50,NaN,109"), r"trace:3: ContextTokens: invalid value 'NaN'"),
        (azure("2023-11-16 18:15:50,,109"), r"trace:3: ContextTokens: invalid value ''"),
        (azure("2023-11-16 18:15:50,99999999999999999999,1"), r"trace:3: ContextTokens: invalid value"),
        (azure("2023-11-16 18:15:50,100000001,1"), r"trace:3: ContextTokens is above 100000000"),
        (azure("2023-11-16 18:15:50,-1,109"), r"trace:3: ContextTokens is below 1"),
        (azure("2023-11-16 18:15:50,0,109"), r"trace:3: ContextTokens is below 1"),
        (azure("2023-11-16 18:15:50,5,-109"), r"trace:3: GeneratedTokens is below 0"),
        (azure("2023-13-16 18:15:50,5,109"), r"trace:3: TIMESTAMP: invalid value"),
        (azure("2023-11-16 18:15:40,5,109"), r"trace:3: TIMESTAMP goes back"),
        (azure("2023-11-16 18:18:40,5,109"), r"trace:4: TIMESTAMP goes back"),
        (azure(""), r"trace:3: TIMESTAMP: "),
        (plain("nan,1,1"), r"trace:3: arrival_s is missing or not finite"),
        (plain("inf,1,1\ninf,1,1"), r"trace:3: arrival_s is missing or not finite"),
        ("arrival_s,input_tokens,output_tokens\n-1,1,1\n", r"trace:2: arrival_s goes back behind the first"),
        (mooncake(timestamp=None), r"trace:3: timestamp is missing or not finite"),
        (mooncake(output_length=...), r"trace:3: output_length is missing or not a whole number"),
        (mooncake(input_length=5.5), r"trace:3: input_length is missing or not a whole number"),
        (mooncake(input_length="5"), r"trace:3: input_length is '5', must be a number"),
        (mooncake(input_length=True), r"trace:3: input_length is True, must be a number"),
        (mooncake(input_length=float("nan")), r"trace:3: input_length is missing or not a whole number"),
        (mooncake(input_length=-3), r"trace:3: input_length is below 1"),
        (mooncake(timestamp=1000), r"trace:4: timestamp goes back"),
        (mooncake()[:-20], r"trace:4: not valid JSON"),
        (mooncake() + "[1, 2]\n", r"trace:5: is not a JSON object"),
    ],
)
def test_a_wrong_file_is_named_by_line_and_column(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        read_trace(write(tmp_path, content, "trace"))


@pytest.mark.parametrize(
    ("last", "requests"),
    [
        # A cut at the end of a line, or within the last number, leaves a legal file of fewer or smaller numbers.
        ("4.315,396,109", 2), ("4.315,396,10", 2), ("4.315,396,1", 2), ("", 1),
        ("4.315,396,", None), ("4.315,396", None), ("4.315,39", None), ("4.315,", None), ("4.315", None), ("4", None),
    ],
)  # fmt: skip
def test_a_file_cut_short_is_refused_unless_the_cut_leaves_a_legal_one(tmp_path, last, requests):
    path = write(tmp_path, PLAIN.replace("4.315,396,109\n", last))
    if requests is not None:
        assert len(read_trace(path)) == requests
        return
    with pytest.raises(InputError, match=r"trace.csv:3: "):
        read_trace(path)


@pytest.mark.parametrize("rows", [10, 200_000])
def test_the_line_is_right_however_long_the_file(tmp_path, rows):
    body = "".join(f"{i},5,5\n" for i in range(rows))
    path = write(tmp_path, f"arrival_s,input_tokens,output_tokens\n{body}1e7,5,x\n1e8,5,5\n")
    with pytest.raises(InputError, match=rf"trace.csv:{rows + 2}: output_tokens: invalid value 'x'"):
        read_trace(path)


def test_a_missing_file_a_folder_and_a_broken_archive_are_refused(tmp_path):
    for path in (tmp_path / "absent.csv", tmp_path, write(tmp_path, "no archive", "broken.gz")):
        with pytest.raises(InputError, match="cannot be read"):
            read_trace(path)


def test_an_unknown_format_and_a_file_of_another_format_are_refused(tmp_path):
    path = write(tmp_path, AZURE)
    with pytest.raises(InputError, match=r"unknown trace format 'azzure' \(did you mean azure"):
        read_trace(path, "azzure")
    with pytest.raises(InputError, match=r"trace.csv:1: is not in format mooncake but in azure"):
        read_trace(path, "mooncake")


def test_milliseconds_in_place_of_seconds_are_noticed_unless_the_format_is_named(tmp_path):
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n0,a,1,1,2,x\n5000000000,a,1,1,2,x\n"
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=r"Timestamp spans 158 years.*name the format: burstgpt"):
        read_trace(path)
    assert read_trace(path, "burstgpt").arrival_s[-1] == 5e9


def test_seconds_in_place_of_milliseconds_are_noticed_unless_the_format_is_named(tmp_path):
    lines = [json.dumps({"timestamp": i // 3, "input_length": 5, "output_length": 3}) for i in range(1500)]
    path = write(tmp_path, "\n".join(lines))
    with pytest.raises(InputError, match=r"1500 requests within 0.499 s: timestamp looks as if it were in seconds"):
        read_trace(path)
    assert len(read_trace(path, "mooncake")) == 1500


@pytest.mark.parametrize(
    ("name", "rate", "prompt", "response"),
    [("azure2023_conv", 5.5, 1155, 211), ("azure2023_code", 2.6, 2048, 28)],
)
def test_azure_traces_have_their_documented_statistics(reference_data, name, rate, prompt, response):
    statistics = length_statistics(read_trace(reference_data / "traces" / f"{name}.csv"))
    assert statistics.requests_per_s == pytest.approx(rate, rel=0.02)
    assert statistics.mean_input_tokens == pytest.approx(prompt, rel=1e-3)
    assert statistics.mean_output_tokens == pytest.approx(response, rel=5e-3)
