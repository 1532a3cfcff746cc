"""The GPU catalogue and a user's own GPU."""

from __future__ import annotations

import json
import math

import pytest

from tracefit.errors import UsageError
from tracefit.server.hardware import CATALOGUE, find_gpu, find_gpus, parse_gpu, read_gpu

OWN = {"memory_bandwidth_gb_s": 1000, "compute_tflops_fp16": 100, "memory_gb": 32, "sm_count": 60}


# Names as drivers, clouds, Kubernetes labels and people write them, by the GPU they mean.
NAMES = {
    "H100-SXM": """H100|h100 sxm|H100-SXM|H100_SXM5_80GB|NVIDIA H100 80GB HBM3|nvidia-h100-80gb|nvidia-h100-mega-80gb|
        NVIDIA-H100-80GB-HBM3-SHARED|nvidia-h100-80gb-hbm3-SHARED|H100-80|NVIDIA H100 Tensor Core GPU|NVIDIA HGX H100""",
    "H100-PCIe": "NVIDIA H100 PCIe|H100-80GB-PCIe|NVIDIA-H100-PCIe",
    "H100-NVL": "NVIDIA H100 NVL|H100 94GB|nvidia-h100-nvl",
    "H200-SXM": "NVIDIA H200|H200 141GB HBM3e|nvidia-h200-141gb|H200-SXM-141GB",
    "H200-NVL": "NVIDIA H200 NVL|H200-NVL",
    "GH200-96GB": "GH200|NVIDIA GH200 480GB|NVIDIA GH200 120GB|GH200-96GB-HBM3",
    "GH200-144GB": "NVIDIA GH200 144G HBM3e|GH200 144GB",
    "H800-SXM": "NVIDIA H800|H800-80GB",
    "H800-PCIe": "NVIDIA H800 PCIe",
    "H20": "NVIDIA H20|H20-96GB",
    "A100-80GB-SXM": "A100|A100-80GB|A100-SXM4-80GB|nvidia-a100-80gb|NVIDIA-A100-SXM4-80GB-SHARED|A100-80-SXM|A100-80G|nvidia-tesla-a100-80gb",
    "A100-40GB-SXM": "NVIDIA A100-SXM4-40GB|nvidia-tesla-a100|A100-40GB|A100-40|A100-40G|A100-40-SXM",
    "A100-80GB-PCIe": "NVIDIA A100 80GB PCIe|A100-PCIe|NVIDIA-A100-80GB-PCIe",
    "A100-40GB-PCIe": "NVIDIA A100-PCIE-40GB|A100 PCIe 40|A100 40GB PCIe",
    "A800-80GB-SXM": "NVIDIA A800-SXM4-80GB|A800",
    "A800-80GB-PCIe": "NVIDIA A800 80GB PCIe",
    "A800-40GB-PCIe": "NVIDIA A800 40GB Active",
    "A30": "NVIDIA A30|a30-24gb",
    "A40": "NVIDIA A40|NVIDIA-A40-48GB",
    "A10": "NVIDIA A10|A10-24GB",
    "A10G": "NVIDIA A10G|NVIDIA-A10G-SHARED",
    "T4": "Tesla T4|nvidia-tesla-t4|NVIDIA T4",
    "L4": "NVIDIA L4|nvidia-l4|L4-24GB",
    "L20": "NVIDIA L20",
    "L40": "NVIDIA L40|l40-48gb",
    "L40S": "l40s|NVIDIA L40S|nvidia-l40s",
    "RTX-3090": "NVIDIA GeForce RTX 3090|3090",
    "RTX-4090": "NVIDIA GeForce RTX 4090|RTX-4090-24GB|4090",
    "RTX-5090": "rtx 5090|NVIDIA GeForce RTX 5090",
    "RTX-A6000": "NVIDIA RTX A6000|A6000|NVIDIA-RTX-A6000",
    "RTX-6000-Ada": "NVIDIA RTX 6000 Ada Generation|RTX 6000 Ada|RTX6000-Ada",
    "RTX-PRO-6000": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition|RTX PRO 6000|rtx pro 6000 96gb",
    "RTX-PRO-6000-Server": "NVIDIA RTX PRO 6000 Blackwell Server Edition|RTX PRO 6000 Server|nvidia-rtx-pro-6000",
    "RTX-PRO-6000-Max-Q": "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition|RTX PRO 6000 Max-Q",
    "V100-16GB-SXM2": "Tesla V100-SXM2-16GB|nvidia-tesla-v100|V100",
    "V100-32GB-SXM2": "Tesla V100-SXM2-32GB|V100-32GB",
    "V100-16GB-PCIe": "Tesla V100-PCIE-16GB",
    "V100-32GB-PCIe": "Tesla V100-PCIE-32GB",
    "B200": "NVIDIA B200|nvidia-b200|B200 180GB",
    "GB200": "NVIDIA GB200|nvidia-gb200|GB200 NVL72",
    "B300": "NVIDIA B300 SXM6 AC|B300",
    "GB300": "NVIDIA GB300|GB300 NVL72",
    "GB10": "NVIDIA GB10|DGX Spark",
    "MI300X": "AMD Instinct MI300X|MI300X VF|AMD Instinct MI300X VF|AMD-Instinct-MI300X-OAM|mi300x 192gb",
    "MI300A": "AMD Instinct MI300A|mi300a",
    "MI325X": "mi325x|AMD Instinct MI325X",
    "MI350X": "AMD Instinct MI350X",
    "MI355X": "mi355x|AMD Instinct MI355X VF",
}


@pytest.mark.parametrize("gpu", NAMES)
def test_a_gpu_has_several_names(gpu):
    written = [name.strip() for name in NAMES[gpu].split("|")]

    assert {name: find_gpus(name) for name in (gpu, *written)} == dict.fromkeys((gpu, *written), (CATALOGUE[gpu], 1))


def test_every_gpu_of_the_catalogue_is_in_the_table_of_names():
    assert set(NAMES) == set(CATALOGUE)


@pytest.mark.parametrize(
    ("written", "gpu", "count"),
    [
        ("8xH100", "H100-SXM", 8),
        ("8x H100", "H100-SXM", 8),
        ("8 x NVIDIA H100", "H100-SXM", 8),
        ("8 \N{MULTIPLICATION SIGN} H100", "H100-SXM", 8),
        ("8 NVIDIA H100 80GB HBM3", "H100-SXM", 8),
        ("H100:8", "H100-SXM", 8),
        ("H100 x8", "H100-SXM", 8),
        ("H100x8", "H100-SXM", 8),
        ("H100 (8x)", "H100-SXM", 8),
        ("HGX H100 8-GPU", "H100-SXM", 8),
        ("A100-80GB:4", "A100-80GB-SXM", 4),
        ("4x A100 40GB", "A100-40GB-SXM", 4),
        ("2 x NVIDIA GeForce RTX 4090", "RTX-4090", 2),
        ("4x4090", "RTX-4090", 4),
        ("8xMI300X", "MI300X", 8),
        ("MI300X x8", "MI300X", 8),
        ("2xL4", "L4", 2),
        ("2xL40S", "L40S", 2),
        ("1xA10G", "A10G", 1),
        ("7x H100 MIG 1g.10gb", "H100-SXM MIG 1g.10gb", 7),
    ],
)
def test_a_name_may_count_gpus(written, gpu, count):
    found, number = find_gpus(written)

    assert (found.name, number) == (gpu, count)


@pytest.mark.parametrize(
    ("written", "gpu", "compute", "memory_gb", "bandwidth"),
    [
        ("H100 80GB HBM3 MIG 3g.40gb", "H100-SXM MIG 3g.40gb", 3 / 7, 40, 4 / 8),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100-SXM MIG 1g.10gb", 1 / 7, 10, 1 / 8),
        ("NVIDIA-H100-80GB-HBM3-MIG-1g.20gb", "H100-SXM MIG 1g.20gb", 1 / 7, 20, 2 / 8),
        ("H100 MIG 1g.10gb+me", "H100-SXM MIG 1g.10gb", 1 / 7, 10, 1 / 8),
        ("H100 MIG 7g.80gb", "H100-SXM MIG 7g.80gb", 1, 80, 1),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100-40GB-SXM MIG 1g.5gb", 1 / 7, 5, 1 / 8),
        ("A100 MIG 4g.40gb", "A100-80GB-SXM MIG 4g.40gb", 4 / 7, 40, 4 / 8),
        ("A100 MIG 1c.3g.40gb", "A100-80GB-SXM MIG 1c.3g.40gb", 1 / 7, 40, 4 / 8),
        ("NVIDIA H200 MIG 3g.71gb", "H200-SXM MIG 3g.71gb", 3 / 7, 71, 4 / 8),
        ("NVIDIA A30 MIG 2g.12gb", "A30 MIG 2g.12gb", 2 / 4, 12, 2 / 4),
        ("NVIDIA B200 MIG 1g.23gb", "B200 MIG 1g.23gb", 1 / 7, 23, 1 / 8),
        ("NVIDIA B300 MIG 7g.269gb", "B300 MIG 7g.269gb", 1, 269, 1),
        (
            "NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb",
            "RTX-PRO-6000-Server MIG 1g.24gb",
            1 / 4,
            24,
            1 / 4,
        ),
    ],
)
def test_a_slice_has_its_own_memory_and_share(written, gpu, compute, memory_gb, bandwidth):
    found, whole = find_gpu(written), CATALOGUE[gpu.split(" MIG ")[0]]

    assert (found.name, found.memory_gb) == (gpu, memory_gb)
    assert found.compute_tflops_fp16 == pytest.approx(whole.compute_tflops_fp16 * compute)
    assert found.memory_bandwidth_gb_s == pytest.approx(whole.memory_bandwidth_gb_s * bandwidth)
    assert (found.link_gb_s, found.sm_count) == (None, None)
    assert find_gpu(found.name) == found


@pytest.mark.parametrize(
    "written",
    [
        "RTX 6000",
        "Quadro RTX 6000",
        "NVIDIA GeForce RTX 3090 Ti",
        "RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "RTX 5090 Laptop GPU",
        "A100X",
        "A100-SXM-64GB",
        "\n    H100 64GB",
        "H100 40GB",
        "H20 141GB",
        "T4G",
        "L4S",
        "L40 24GB",
        "NVIDIA A10-24Q",
        "A1000",
        "RTX A5000",
        "MI300",
        "MI250X",
        "B100",
        "H100 SXM PCIe",
        "L4 8",
        "8",
        "8x",
        "0xH100",
        "\n    nvidia.com/gpu",
        "nvidia.com/mig-1g.10gb",
        "MIG 3g.40gb",
        "H100 MIG",
        "H100 MIG 1g.90gb",
        "H100 MIG 5g.10gb",
        "L4 MIG 1g.3gb",
        "T4 MIG 1g.5gb",
        "A30 MIG 7g.24gb",
    ],
)
def test_a_name_of_another_gpu_is_not_known(written):
    with pytest.raises(UsageError, match="is not known"):
        find_gpu(written.strip())


def test_a_slice_without_its_gpu_says_so():
    with pytest.raises(UsageError, match="a MIG slice is known by its GPU and its profile"):
        find_gpu("nvidia.com/mig-1g.10gb")


@pytest.mark.parametrize("written", ["H100", "A100-80GB", "L4"])
def test_case_spaces_and_dashes_do_not_matter(written):
    spellings = (written.lower(), written.replace("-", " "), written.replace("-", "_"), f"NVIDIA {written}")

    assert {find_gpu(spelling).name for spelling in spellings} == {find_gpu(written).name}


# From vendors' datasheets: dense TFLOPS at fp16, fp8 and fp4, memory in GB and GB/s, link in GB/s, multiprocessors.
VALUES = {
    "H100-SXM": (989.5, 1979, None, 80, 3350, 900, 132),
    "H100-PCIe": (756.5, 1513, None, 80, 2000, 600, 114),
    "H100-NVL": (835.5, 1670.5, None, 94, 3900, 600, 132),
    "H200-SXM": (989.5, 1979, None, 141, 4800, 900, 132),
    "H200-NVL": (835.5, 1670.5, None, 141, 4800, 900, 132),  # 1,671 and 3,341 with sparsity
    "GH200-96GB": (990, 1979, None, 96, 4000, 900, 132),
    "GH200-144GB": (990, 1979, None, 144, 4900, 900, 132),
    "H800-SXM": (989.5, 1979, None, 80, 3350, 400, 132),
    "H800-PCIe": (756.5, 1513, None, 80, 2000, 400, 114),
    "H20": (148, 296, None, 96, 4000, 900, 78),
    "A100-80GB-SXM": (312, None, None, 80, 2039, 600, 108),
    "A100-40GB-SXM": (312, None, None, 40, 1555, 600, 108),
    "A100-80GB-PCIe": (312, None, None, 80, 1935, 600, 108),
    "A100-40GB-PCIe": (312, None, None, 40, 1555, 600, 108),
    "A800-80GB-SXM": (312, None, None, 80, 2039, 400, 108),
    "A800-80GB-PCIe": (312, None, None, 80, 1935, 400, 108),
    "A800-40GB-PCIe": (312, None, None, 40, 1555, 400, 108),
    "A30": (165, None, None, 24, 933, 200, 56),
    "A40": (149.7, None, None, 48, 696, 112.5, 84),
    "A10": (125, None, None, 24, 600, None, 72),
    "A10G": (70, None, None, 24, 600, None, 80),
    "T4": (65, None, None, 16, 320, None, 40),
    "L4": (121, 242, None, 24, 300, None, 58),
    "L20": (119.5, 239, None, 48, 864, None, 92),
    "L40": (181, 362, None, 48, 864, None, 142),
    "L40S": (362, 733, None, 48, 864, None, 142),
    "RTX-3090": (71.2, None, None, 24, 936, 112.5, 82),
    "RTX-4090": (165.2, 330.3, None, 24, 1008, None, 128),
    "RTX-5090": (209.5, 419, 1676, 32, 1792, None, 170),
    "RTX-A6000": (154.8, None, None, 48, 768, 112.5, 84),  # 309.7 with sparsity
    "RTX-6000-Ada": (364.2, 728.5, None, 48, 960, None, 142),  # 1,457 with sparsity at fp8
    "RTX-PRO-6000": (503.8, 1007.6, 2015.2, 96, 1792, None, 188),  # 4,030 with sparsity at fp4
    "RTX-PRO-6000-Server": (500, 1000, 2000, 96, 1597, None, 188),  # 1, 2 and 4 PFLOPS with sparsity
    "RTX-PRO-6000-Max-Q": (438.9, 877.9, 1755.7, 96, 1792, None, 188),  # 3,511 with sparsity at fp4
    "V100-16GB-SXM2": (125, None, None, 16, 900, 300, 80),
    "V100-32GB-SXM2": (125, None, None, 32, 900, 300, 80),
    "V100-16GB-PCIe": (112, None, None, 16, 900, None, 80),
    "V100-32GB-PCIe": (112, None, None, 32, 900, None, 80),
    "B200": (2250, 4500, 9000, 180, 8000, 1800, 148),
    "GB200": (2500, 5000, 10000, 186, 8000, 1800, 148),
    "B300": (
        2250,
        4500,
        13500,
        288,
        8000,
        1800,
        None,
    ),  # HGX B300, 8 GPUs: 36, 72 PFLOPS with sparsity; 108 dense at fp4
    "GB300": (
        2500,
        5000,
        15000,
        288,
        8000,
        1800,
        None,
    ),  # GB300 NVL72: 360, 720 PFLOPS with sparsity; 1,080 dense at fp4
    "GB10": (125, 250, 500, 128, 273, None, 48),  # DGX Spark: 1 PFLOPS with sparsity at fp4
    "MI300X": (1307, 2615, None, 192, 5300, 896, 304),
    "MI300A": (980.6, 1961.2, None, 128, 5300, 768, 228),
    "MI325X": (1307, 2615, None, 256, 6000, 896, 304),
    "MI350X": (2307, 4614, 9227, 288, 8000, 1075, 256),  # 7 links of 153.6 GB/s
    "MI355X": (2517, 5033, 10066, 288, 8000, 1075, 256),
}


def test_catalogue_values():
    keys = (
        "compute_tflops_fp16",
        "compute_tflops_fp8",
        "compute_tflops_fp4",
        "memory_gb",
        "memory_bandwidth_gb_s",
        "link_gb_s",
        "sm_count",
    )
    for gpu in CATALOGUE.values():
        stated = {key: getattr(gpu, key) for key in keys}
        assert tuple(stated.values()) == VALUES[gpu.name]
        assert gpu.confidence == ("low" if gpu.name in {"A10G", "L20", "GB10"} else "high")
    assert set(CATALOGUE) == set(VALUES)


def test_derived_values():
    h100, a100 = find_gpu("H100"), find_gpu("A100")

    assert h100.compute_to_bandwidth == pytest.approx(989.5e12 / 3350e9)
    assert h100.relative_performance == 1.0
    assert a100.relative_performance == pytest.approx(math.sqrt(312 / 989.5 * 2039 / 3350))
    assert h100.slug == "h100-sxm"


def test_facts_are_scalars():
    facts = find_gpu("L4").facts()

    assert facts["gpu"] == "L4"
    assert facts["link_gb_s"] is None
    assert "compute_tflops_fp4" not in facts
    assert find_gpu("B200").facts()["compute_tflops_fp4"] == 9000
    assert all(value is None or isinstance(value, str | int | float) for value in facts.values())


def test_an_unknown_gpu_suggests_the_closest_and_lists_all():
    with pytest.raises(UsageError, match=r"GPU 'H10O' is not known; did you mean H100.*known: .*MI325X") as caught:
        find_gpu("H10O")

    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["", "   ", "TPU v5e", "NVIDIA", "x" * 10_000, "\x00\n"])
def test_any_unknown_name_is_one_short_line(name):
    with pytest.raises(UsageError, match="is not known") as caught:
        find_gpu(name)

    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


# -- a user's own ----------------------------------------------------------------------------------------


def test_gpu_file_with_a_single_object(tmp_path):
    path = tmp_path / "my-gpu.json"
    path.write_text(json.dumps({**OWN, "link_gb_s": 64, "compute_tflops_fp8": 200}))
    gpu = read_gpu(path)

    assert (gpu.name, gpu.compute_tflops_fp16, gpu.memory_gb, gpu.sm_count) == ("my-gpu", 100.0, 32.0, 60)
    assert (gpu.link_gb_s, gpu.compute_tflops_fp8, gpu.confidence) == (64.0, 200.0, "given")


def test_a_gpu_file_may_describe_a_small_gpu():
    assert parse_gpu(json.dumps({**OWN, "memory_gb": 0.5, "sm_count": 1}), where="x").memory_gb == 0.5


def test_gpu_file_may_have_a_name():
    assert parse_gpu(json.dumps({**OWN, "name": "Mine"}), where="x").name == "Mine"


def test_gpu_file_that_maps_a_name():
    assert parse_gpu(json.dumps({"H100": OWN}), where="x").name == "H100"
    with pytest.raises(UsageError, match="describes several GPUs; keep one of H100, A100"):
        parse_gpu(json.dumps({"H100": OWN, "A100": OWN}), where="x")


def test_gpu_is_restored_from_its_facts():
    gpu = find_gpu("H100")
    again = parse_gpu(json.dumps({"name": gpu.name, **gpu.facts()}), where="x")

    assert {**again.facts(), "gpu_confidence": "high"} == gpu.facts()


@pytest.mark.parametrize("key", ["memory_bandwidth_gb_s", "compute_tflops_fp16", "memory_gb"])
def test_missing_value_is_named(key):
    with pytest.raises(UsageError, match=rf"gpu\.json: {key} is missing; keys: "):
        parse_gpu(json.dumps({name: value for name, value in OWN.items() if name != key}), where="gpu.json")


def test_a_misspelled_value_is_named_with_the_missing_one():
    own = {**OWN, "memory_bandwith_gb_s": OWN["memory_bandwidth_gb_s"]}
    del own["memory_bandwidth_gb_s"]
    with pytest.raises(
        UsageError, match="memory_bandwidth_gb_s is missing; the file has memory_bandwith_gb_s; keys: compute"
    ):
        parse_gpu(json.dumps(own), where="gpu.json")


@pytest.mark.parametrize("key", [*OWN, "link_gb_s", "compute_tflops_fp8", "compute_tflops_fp4"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e300, 10**400, "fast", True, [1]])
def test_value_that_cannot_be_is_refused(key, value):
    with pytest.raises(UsageError, match=rf"gpu\.json: {key} must be (a |greater |less )") as caught:
        parse_gpu(json.dumps({**OWN, key: value}), where="gpu.json")

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds a list"),
        ("{}", "describes no GPU"),
        ('{"H100": 3}', "H100 is a number, not an object"),
        ('{"H100": {}}', "compute_tflops_fp16 is missing"),
        ("nonsense", "is not JSON"),
    ],
)
def test_file_that_is_no_gpu_is_one_line(text, message):
    with pytest.raises(UsageError, match=message):
        parse_gpu(text, where="gpu.json")
