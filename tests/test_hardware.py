from realm_jax import hardware


def test_chips_are_found_by_what_jax_calls_them():
    for kind, name in {
        "TPU v3": "v3",
        "TPU v5 lite": "v5litepod",
        "TPU v5": "v5p",
        "TPU v6 lite": "v6e",
        "TPU7x": "tpu7x",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-80GB": "a100",
    }.items():
        assert hardware.find_chip(kind) is hardware.CHIPS[name]
    assert hardware.find_chip("cpu") is hardware.find_chip("TPU v99") is None


def test_a_slice_of_the_papers_size_has_the_published_peak():
    """REALM trained on 64 cores of TPU v3: 32 chips of 123 TFLOP/s."""
    chip = hardware.CHIPS["v3"]
    assert 64 * chip.peak_flops == 32 * 123e12
    assert chip.devices * chip.memory == 32 << 30


def test_bfloat16_products_pay_where_they_were_seen_to(tmp_path):
    """A Xeon without AMX was chosen by its flag once, and took 1.3 times as long."""
    assert not hardware.multiplies_bfloat16(str(tmp_path / "absent"))
    for number, (vendor, flags, faster) in enumerate(
        (
            ("AuthenticAMD", "avx512f avx512_bf16", True),
            ("AuthenticAMD", "avx512f", False),
            ("GenuineIntel", "avx512f avx512_bf16", False),
            ("GenuineIntel", "avx512f avx512_bf16 amx_bf16 amx_tile", True),
        )
    ):
        path = tmp_path / str(number)
        path.write_text(f"vendor_id\t: {vendor}\nflags\t\t: {flags}\n")
        assert hardware.multiplies_bfloat16(str(path)) is faster, (vendor, flags)
