import pytest

from realm_jax import chips


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v3", "v3"),
        ("TPU v5 lite", "v5litepod"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
    ],
)
def test_chips_are_found_by_what_jax_calls_them(kind, name):
    assert chips.find(kind) is chips.CHIPS[name]


def test_what_is_not_known_is_not_guessed():
    assert chips.find("cpu") is None
    assert chips.find("TPU v99") is None


def test_a_slice_of_the_papers_size_has_the_published_peak():
    """REALM trained on 64 cores of TPU v3: 32 chips of 123 TFLOP/s."""
    chip = chips.CHIPS["v3"]
    assert 64 * chip.peak_flops == 32 * 123e12
    assert chip.devices * chip.memory == 32 << 30


@pytest.mark.parametrize(
    ("vendor", "flags", "faster"),
    [
        ("AuthenticAMD", "avx512f avx512_bf16", True),
        ("AuthenticAMD", "avx512f", False),
        ("GenuineIntel", "avx512f avx512_bf16", False),
        ("GenuineIntel", "avx512f avx512_bf16 amx_bf16 amx_tile", True),
    ],
)
def test_bfloat16_products_pay_where_they_were_seen_to(tmp_path, vendor, flags, faster):
    """A Xeon without AMX was chosen by its flag once, and took 1.3 times as long."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n")
    assert chips.multiplies_bfloat16(str(cpuinfo)) is faster


def test_a_machine_that_does_not_say_multiplies_float32(tmp_path):
    assert not chips.multiplies_bfloat16(str(tmp_path / "absent"))
