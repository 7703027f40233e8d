"""Folders of modules as a user would bring them, made from ours."""

from __future__ import annotations

from pathlib import Path

from tilewright.cosim.sources import RTL_FOLDER


def wrong_constant(folder: Path) -> Path:
    """A part of the MAC array, in a `.v`, that adds too much to every sum."""
    text = (RTL_FOLDER / "tw_mac_registers.sv").read_text("utf-8")
    changed = text.replace("32'(sum[c]);", "32'(sum[c]) + 32'd65536;")
    assert changed != text
    (folder / "tw_mac_registers.v").write_text(changed, "utf-8")
    return folder


def slow_engine(folder: Path) -> Path:
    """A MAC array that rests a cycle before it takes an instruction: ours in a wrapper."""
    text = (RTL_FOLDER / "tw_mac.sv").read_text("utf-8")
    (folder / "my_core.sv").write_text(text.replace("module tw_mac\n", "module my_core\n"), "utf-8")
    ports = text[text.index("    input logic clk,") : text.index("\n);")]
    wrapper = f"""module tw_mac
  import tw_pkg::*;
(
{ports}
);
  logic rested_q;
  always_ff @(posedge clk) rested_q <= idle && head_valid && !rested_q;
  my_core core (.head_valid(head_valid && rested_q), .*);
endmodule
"""
    (folder / "tw_mac.sv").write_text(wrapper, "utf-8")
    return folder
