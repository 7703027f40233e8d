"""Seeded random chips, legal by the target's own rules: every size a YAML file may give."""

from __future__ import annotations

import numpy as np
from pydantic import ValidationError

from tilewright.spec.hardware import Hardware


def random_target(seed: int) -> Hardware:
    """Return a chip; combinations the target's rules refuse are drawn again."""
    rng = np.random.default_rng(seed)

    def pick(*options: int) -> int:
        return int(rng.choice(options))

    while True:
        array = pick(4, 8, 16, 32, 64, 128, 256)
        word = pick(4, 8, 16, 64, 256)
        banks = pick(2, 3, 4, 8, 64)
        unit = banks * word
        size = int(np.exp(rng.uniform(np.log(4096), np.log(1 << 24)))) if pick(0, 1) else 4096
        fields = {
            "name": f"random{seed}",
            "mac_array_size": (array, array),
            "mac_saturation": bool(pick(0, 1)),
            "rounding": str(rng.choice(["half_up", "half_away", "half_even", "truncate"])),
            "vector_lanes": array,
            "vector_registers": pick(8, 9, 16, 17, 128),
            "scalar_registers": pick(4, 32),
            "matrix_registers": pick(2, 4, 16),
            "matrix_register_rows": pick(4, 5, 17, 64, 1024),
            "quant_banks": pick(2, 3, 4),
            "quant_bank_entries": pick(4, 5, 16),
            "sram_size": max(-(-4096 // unit), size // unit) * unit,
            "sram_banks": banks,
            "sram_word_bytes": word,
            "core_clock_mhz": pick(1, 7, 333, 1000, 5000),
            "ddr_clock_mhz": pick(1, 13, 800, 4999),
            "ddr_bus_bytes": pick(1, 2, 8, 64, 256),
            "ddr_address_bits": pick(20, 32, 40),
            "dma_clock_mhz": pick(1, 11, 500, 5000),
            "dma_channels": pick(2, 3, 4),
            "dma_bus_bytes": pick(1, 3, 16, 256),
            "dma_burst_size": pick(8, 64, 512, 4096),
            "tensor_alignment": pick(1, 2, 64, 4096),
            "dma_latency": pick(1, 8, 1000),
            "dma_stream_latency_factor": pick(1, 3, 16),
            "mac_latency": pick(1, 12, 1000),
            "vector_latency": pick(1, 3, 1000),
            "queue_depth": pick(2, 3, 16, 64),
            "vector_rows": bool(pick(0, 1)),
        }
        try:
            return Hardware.model_validate(fields)
        except ValidationError:
            continue
