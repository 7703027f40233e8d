"""The catalogue of hardware faults that can be planted in the RTL.

A build with faults has an input that chooses one (0: none), so that one build serves them all; a
build without has no trace of them. Each is a mistake real chips were made with.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A planted fault."""

    number: int
    """Value of the input `fault`; stable, from 1."""
    name: str
    """Identifier in the RTL, lower case: `FAULT_<NAME>`."""
    module: str
    """SystemVerilog module it is planted in."""
    doc: str


FAULTS: tuple[Fault, ...] = (
    Fault(1, "ddr_high_bits", "tw_dma", "DDR address lines 36 to 39 are cut."),
    Fault(2, "burst_boundary", "tw_dma", "A burst's address wraps at 4 KiB instead of going on."),
    Fault(3, "pad_off_by_one", "tw_dma", "`pad1_lo` counts one step too few when it is above 1."),
    Fault(4, "store_mask", "tw_dma", "A stream store writes whole DDR units, not only its bytes."),
    Fault(5, "stall_prime_k", "tw_mac", "After a weight row was stalled in a step with a prime "
          "number of rows the stall is never cleared."),
    Fault(6, "swap_early", "tw_mac", "Weight sets swap one cycle early."),
    Fault(7, "acc_not_cleared", "tw_mac", "A half filled a second time by one instruction starts "
          "from its old content."),
    Fault(8, "weight_sign", "tw_mac", "Weights of the last column are not sign-extended."),
    Fault(9, "saturation", "tw_mac", "Accumulators wrap where they saturate, and the reverse."),
    Fault(10, "param_alias", "tw_vec", "The upper bit of the parameter bank is not decoded."),
    Fault(11, "round_ties", "tw_vec", "Ties are rounded as by another rounding."),
    Fault(12, "shift_high", "tw_vec", "The shift's bit 5 is not wired."),
    Fault(13, "table_last", "tw_vec", "The table's entry 255 reads entry 254."),
    Fault(14, "resize_weight", "tw_vec", "Row weights 0 and 1 are exchanged in odd columns."),
    Fault(15, "drain_early", "tw_vec", "A drain does not wait for its half to be full."),
    Fault(16, "arbiter_starves", "tw_sram", "In a conflict DMA channel 0 never wins its bank."),
    Fault(17, "loop_count", "tw_seq", "A loop runs once too few when its count is above 2."),
    Fault(18, "register_carry", "tw_seq", "The carry from bit 15 of an R register's sum is lost."),
    Fault(19, "semaphore_lost", "tw_sem", "Of two engines that signal in one cycle the second's "
          "signals are lost."),
    Fault(20, "queue_slot", "tw_queue", "The MAC queue's last slot is never written."),
    Fault(21, "row_tail", "tw_vec", "Lanes beyond the end of a row take part in its sums."),
    Fault(22, "root_odd", "tw_vec", "A root is drawn of an odd number of bits as of an even one."),
)  # fmt: skip
