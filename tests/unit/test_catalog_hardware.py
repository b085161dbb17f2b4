"""GPU facts, node configurations and prices: against reference data, the rules they are made by, and bad tables."""

from __future__ import annotations

import csv
import pickle
from pathlib import Path
from statistics import fmean

import pytest

from coral_core.catalog import catalog_names, find_config, find_gpu, load_catalog, load_gpus
from coral_core.catalog.hardware import CONFIG_COLUMNS, GPU_COLUMNS, PRICE_COLUMNS, read_configs, read_gpus, read_prices
from coral_core.catalog.paper import COST_COLUMNS, GCP_COLUMNS, read_gcp_offers, read_relative_costs
from coral_core.catalog.tables import package_table
from coral_core.domain.hardware import LinkKind, Market
from coral_core.errors import InputError
from coral_core.units import GB, GBIT_PER_S, MIB, TERA

L4_USD_PER_H = 0.8048
RELATIVE_COST = {"L4": 1.0, "A10G": 1.2, "L40S": 2.2, "A100": 3.5, "H100": 7.6}


def paper_price(name: str, region: str, config: str) -> float:
    return load_catalog(name).prices[region, config, Market.ON_DEMAND].price_usd_per_h


def test_all_gpus_are_there_and_support_what_their_hardware_does():
    gpus = load_gpus()
    old, new = {"T4", "V100-16", "V100-32"}, {"B200", "RTX-PRO-6000"}
    assert set(gpus) == old | {"A10G", "L4", "L40S", "A100-40", "A100-80", "H100", "H200"} | new
    assert {name for name, gpu in gpus.items() if "bf16" not in gpu.compute_flops_per_s} == old
    assert {name for name, gpu in gpus.items() if "fp8" in gpu.compute_flops_per_s} == {
        "L4",
        "L40S",
        "H100",
        "H200",
    } | new
    pcie = {name for name, gpu in gpus.items() if gpu.link_kind is LinkKind.PCIE}
    assert pcie == {"T4", "A10G", "L4", "L40S", "RTX-PRO-6000"}


def test_peaks_are_dense_and_memory_is_what_is_visible():
    gpus = load_gpus()
    assert gpus["A10G"].compute_flops_per_s["bf16"] == 70 * TERA
    assert gpus["L40S"].compute_flops_per_s["fp8"] == 733 * TERA
    assert gpus["L4"].memory_bytes == gpus["A10G"].memory_bytes == 22_888 * MIB
    assert gpus["L40S"].memory_bytes == 45_776 * MIB


def test_paper_core_is_three_gpus_in_four_sizes_in_two_regions():
    catalog = load_catalog("paper-core")
    assert set(catalog.configs) == {f"{n}x{gpu}" for gpu in ("L40S", "L4", "A10G") for n in (1, 2, 4, 8)}
    assert catalog.regions == ("ap-northeast-2", "us-east-2")
    assert len(catalog.prices) == 24


def test_paper_extended_sells_in_each_cloud_what_the_cloud_has():
    catalog = load_catalog("paper-extended")
    assert len(catalog.configs) == 20
    sold = {region: {config for r, config, _ in catalog.prices if r == region} for region in catalog.regions}
    assert sold["us-east-2"] == sold["ap-northeast-2"] == set(catalog.configs)
    assert sold["us-central1"] == {f"{n}x{gpu}" for gpu in ("L4", "A100", "H100") for n in (1, 2, 4, 8)}
    assert catalog.configs["4xA100"].gpu.name == "A100-80"


@pytest.mark.parametrize("name", ["paper-core", "paper-extended"])
def test_paper_prices_are_relative_costs_times_the_l4_price(name):
    for config in load_catalog(name).configs.values():
        label = config.name.split("x")[1]
        assert paper_price(name, "us-east-2", config.name) == pytest.approx(
            L4_USD_PER_H * RELATIVE_COST[label] * config.gpu_count
        )


def test_the_extended_catalogue_agrees_with_the_core_one():
    core, extended = load_catalog("paper-core"), load_catalog("paper-extended")
    assert set(core.configs) < set(extended.configs)
    for key, price in core.prices.items():
        assert extended.prices[key].price_usd_per_h == price.price_usd_per_h


@pytest.mark.parametrize(("label", "family"), [("L4", "g6"), ("A10G", "g5"), ("L40S", "g6e")])
def test_regional_factors_are_how_the_same_instance_types_differ(label, family):
    aws = load_catalog("aws-real").prices
    factor = fmean(
        aws["ap-northeast-2", f"{family}.{size}", Market.ON_DEMAND].price_usd_per_h
        / aws["us-east-2", f"{family}.{size}", Market.ON_DEMAND].price_usd_per_h
        for size in ("xlarge", "12xlarge", "48xlarge")
    )
    ratio = paper_price("paper-core", "ap-northeast-2", f"4x{label}") / paper_price(
        "paper-core", "us-east-2", f"4x{label}"
    )
    assert ratio == pytest.approx(factor)
    assert (
        f"regional factor {factor:.4f}"
        in load_catalog("paper-core").prices["ap-northeast-2", f"1x{label}", Market.ON_DEMAND].source
    )


def test_paper_nics_are_the_share_of_the_smallest_aws_size_with_as_many_gpus():
    aws = load_catalog("aws-real").configs
    for config in load_catalog("paper-extended").configs.values():
        sizes = [c for c in aws.values() if c.gpu.name == config.gpu.name and c.gpu_count >= config.gpu_count]
        nearest = min(sizes, key=lambda c: (c.gpu_count, c.nic_bytes_per_s))
        assert config.nic_bytes_per_s == pytest.approx(nearest.nic_bytes_per_s * config.gpu_count / nearest.gpu_count)
        assert config.source.startswith("assumption")
        assert nearest.name in config.source
        assert config.cloud == "paper"


def test_aws_real_covers_the_families_and_at_least_eight_regions_where_sold():
    catalog = load_catalog("aws-real")
    for family in ("g4dn", "g5", "g6", "g6e", "p4d", "p4de", "p5", "p5e", "p5en"):
        assert any(name.split(".")[0] == family for name in catalog.configs)
    regions = {name: {region for region, config, _ in catalog.prices if config == name} for name in catalog.configs}
    assert regions["p5e.48xlarge"] == set()
    # AWS sells p4de in six regions only.
    assert {name for name, sold in regions.items() if len(sold) < 8} == {"p5e.48xlarge", "p4de.24xlarge"}


def test_every_fact_has_a_source_and_a_date_and_every_price_a_configuration():
    for name in catalog_names():
        catalog = load_catalog(name)
        for (region, config, market), price in catalog.prices.items():
            assert (price.region, price.config, price.market) == (region, config, market)
            assert config in catalog.configs
            assert price.source
            assert price.as_of.year >= 2025
        assert all(config.source and config.as_of for config in catalog.configs.values())
        assert catalog.note


def test_catalogues_survive_a_process_boundary_and_callers_cannot_change_the_gpus():
    assert pickle.loads(pickle.dumps(load_catalog("paper-core"))) == load_catalog("paper-core")
    load_gpus().clear()
    assert load_gpus()


def test_wrong_names_get_near_misses():
    with pytest.raises(InputError, match=r"unknown catalogue 'paper_core' \(did you mean paper-core"):
        load_catalog("paper_core")
    with pytest.raises(InputError, match=r"unknown GPU 'A100' \(did you mean A100-40 or A100-80"):
        find_gpu(load_gpus(), "A100")
    with pytest.raises(InputError, match=r"demand: unknown node configuration in catalogue paper-core '3xL4'.*4xL4"):
        find_config(load_catalog("paper-core"), "3xL4", where="demand")
    with pytest.raises(InputError, match=r"unknown GPU 'zzz' \(known: A100-40, "):
        find_gpu(load_gpus(), "zzz")
    assert find_config(load_catalog("paper-core"), "4xL4").gpu_count == 4


GPU_ALIAS = {"A100-40": "A100-40GB-SXM", "A100-80": "A100-80GB-SXM", "H100": "H100-80GB-SXM", "H200": "H200-141GB-SXM"}
GPU_ALIAS |= {"V100-16": "V100-16GB", "V100-32": "V100-32GB"}
GPU_ALIAS |= {"B200": "B200-180GB-SXM", "RTX-PRO-6000": "RTX-PRO-6000-Server"}


def read_reference(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", sorted(load_gpus()))
def test_gpu_facts_agree_with_the_reference(reference_data, name):
    rows = {row["gpu"]: row for row in read_reference(reference_data / "specs" / "gpu_specs.csv")}
    row, gpu = rows[GPU_ALIAS.get(name, name)], load_gpus()[name]
    assert gpu.memory_bandwidth_bytes_per_s == float(row["mem_bw_gbs"]) * GB
    assert gpu.link_bytes_per_s == float(row["intra_node_gbs_per_dir_per_gpu"]) * GB
    # Nominal sizes are decimal for some cards and binary for others; what is visible lies near.
    assert 0.93 * float(row["mem_gb"]) * GB < gpu.memory_bytes <= float(row["mem_gb"]) * 2**30
    columns = {
        "fp16": "fp16_dense_tflops",
        "bf16": "bf16_dense_tflops",
        "fp8": "fp8_dense_tflops",
        "int8": "int8_dense_tops",
    }
    for dtype, column in columns.items():
        peak = gpu.compute_flops_per_s.get(dtype)
        assert peak == (float(row[column]) * TERA if row[column] else None), dtype


def test_aws_configurations_agree_with_the_reference(reference_data):
    rows = {
        row["instance_type"]: row for row in read_reference(reference_data / "prices" / "aws_gpu_instance_types.csv")
    }
    for config in load_catalog("aws-real").configs.values():
        row = rows[config.name]
        assert config.gpu_count == int(row["gpu_count"])
        assert config.gpu.name.split("-")[0] == row["gpu"]
        assert config.gpu.memory_bytes == pytest.approx(int(row["gpu_mem_mib"]) * MIB, rel=0.07)
        # The description of the largest g6e adds up its cards; its own figure is the one AWS names.
        stated = float(row["karpenter_bw_mbps"]) / 1000
        assert config.nic_bytes_per_s == stated * GBIT_PER_S


def test_aws_prices_agree_with_the_reference_and_none_is_missing(reference_data):
    rows = read_reference(reference_data / "prices" / "aws_gpu_ondemand_by_region.csv")
    catalog = load_catalog("aws-real")
    stated = {
        (row["region"], row["instance_type"], Market.ON_DEMAND): float(row["on_demand_usd_h"])
        for row in rows
        if row["region_kind"] == "region" and row["instance_type"] in catalog.configs and "-gov-" not in row["region"]
    }
    assert {key: price.price_usd_per_h for key, price in catalog.prices.items()} == stated


def test_google_prices_agree_with_the_reference(reference_data):
    rows = {
        (row["instance_type"], row["region"]): float(row["on_demand_usd_h"])
        for row in read_reference(reference_data / "prices" / "gcp_gpu_prices_by_region.csv")
    }
    offers = read_gcp_offers(package_table("gcp_prices.csv"), load_catalog("aws-real").configs)
    assert offers
    for offer in offers:
        assert offer.price_usd_per_h == pytest.approx(rows[offer.config, offer.region])


TABLES = {
    "gpus.csv": (GPU_COLUMNS, read_gpus),
    "aws_configs.csv": (CONFIG_COLUMNS, lambda file: read_configs(file, load_gpus())),
    "paper_configs.csv": (CONFIG_COLUMNS, lambda file: read_configs(file, load_gpus())),
    "aws_prices.csv": (PRICE_COLUMNS, lambda file: read_prices(file, load_catalog("aws-real").configs)),
    "paper_costs.csv": (COST_COLUMNS, lambda file: read_relative_costs(file, load_catalog("aws-real").configs)),
    "gcp_prices.csv": (GCP_COLUMNS, lambda file: read_gcp_offers(file, load_catalog("aws-real").configs)),
}


@pytest.mark.parametrize(
    ("name", "column", "value", "message"),
    [
        ("gpus.csv", "memory_mib", "15360.5", "memory_mib is '15360.5', must be a whole number of at least 1"),
        (
            "gpus.csv",
            "memory_bandwidth_gb_per_s",
            "nan",
            "memory_bandwidth_gb_per_s is 'nan', must be a number above 0",
        ),
        ("gpus.csv", "memory_mib", "9" * 5001, "memory_mib is '9{60}', must be a whole number of at least 1"),
        ("gpus.csv", "memory_bandwidth_gb_per_s", "", "memory_bandwidth_gb_per_s is empty"),
        ("gpus.csv", "fp16_tflops", "-1", "fp16_tflops is '-1', must be a number above 0"),
        ("gpus.csv", "fp16_tflops", "inf", "fp16_tflops is 'inf'"),
        ("gpus.csv", "fp16_tflops", "many", "fp16_tflops is 'many'"),
        ("gpus.csv", "link_kind", "pci", r"unknown link_kind 'pci' \(did you mean pcie"),
        ("gpus.csv", "source", "", "source is empty"),
        ("gpus.csv", "as_of", "2026-02-30", "as_of is '2026-02-30', must be a date"),
        ("aws_configs.csv", "gpu", "T5", r"unknown gpu 'T5' \(did you mean T4"),
        ("aws_configs.csv", "gpu_count", "0", "gpu_count is '0'"),
        ("aws_prices.csv", "config", "g4dn.large", r"unknown config 'g4dn.large' \(did you mean g4dn."),
        ("aws_prices.csv", "market", "reserved", r"unknown market 'reserved' \(known: on_demand, spot"),
        ("aws_prices.csv", "price_usd_per_h", "0", "price_usd_per_h is '0', must be a number above 0"),
        ("paper_costs.csv", "comparable_aws_configs", "g6.xlarge g6.huge", "unknown comparable_aws_configs 'g6.huge'"),
        ("gcp_prices.csv", "market", "spot", "unknown market 'spot'"),
    ],
)
def test_a_wrong_cell_is_named_by_file_line_and_column(tmp_path, name, column, value, message):
    columns, read = TABLES[name]
    lines = package_table(name).read_text().splitlines()
    cells = dict(zip(columns, next(csv.reader([lines[1]])), strict=True)) | {column: value}
    path = tmp_path / name
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, cells.values()])
    with pytest.raises(InputError, match=rf"{name}:2: {message}"):
        read(path)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_broken_table_is_refused(tmp_path, name):
    columns, read = TABLES[name]
    lines = package_table(name).read_text().splitlines()
    path = tmp_path / name
    for content, message in {
        "\n".join([*lines, lines[1]]): rf"{name}:{len(lines) + 1}: .* is there twice",
        "\n".join([lines[0], lines[1], lines[2][:9]]): rf"{name}:3: \d+ cells, {len(columns)} are due",
        "\n".join([*lines, '"']): rf"{name}:{len(lines) + 1}: not valid CSV: ",
        "\n".join([lines[0], "x" * 200_000]): rf"{name}:2: not valid CSV: ",
        lines[0]: rf"{name}: holds no rows",
        "": rf"{name}:1: columns are ",
        lines[0].replace("source", "origin"): rf"{name}:1: columns are .*due: {columns[0]},",
    }.items():
        path.write_text(content)
        with pytest.raises(InputError, match=message):
            read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=f"{name}: cannot be read"):
        read(path)
