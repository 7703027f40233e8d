// Loop counters of a mac_conv: output-channel block, pixel block, kernel row, kernel column, channel
// block, outermost first (microarchitecture.md, "MAC array": steps). The activation reader has one
// at the step it is in, the weight loader one at the step whose weights it loads.
// Counts are held as the fields hold them, minus one.
module tw_mac_steps
  import tw_pkg::*;
(
    input logic clk,
    input logic begin_instruction,  // `head` is taken: its first step from the next cycle on
    /* verilator lint_off UNUSEDSIGNAL */ // each module uses some of the instruction's fields
    input mac_conv_t head,
    input mac_conv_t instruction,  // the one taken last
    /* verilator lint_on UNUSEDSIGNAL */
    input logic advance,  // to the next step
    output logic first_step,  // of its block
    output logic last_cb,
    output logic last_kx,
    output logic last_step,  // of its block
    output logic last_pb,
    output logic last_ob,
    output logic [11:0] block_rows  // of this block, minus one
);
  logic [9:0] cb_q;
  logic [7:0] kx_q, ky_q;
  logic [5:0] ob_q;
  logic [11:0] rows_left_q;  // output rows from this block on, minus one

  assign first_step = cb_q == '0 && kx_q == '0 && ky_q == '0;
  assign last_cb = cb_q == instruction.c_blocks;
  assign last_kx = kx_q == instruction.k_w;
  assign last_step = last_cb && last_kx && ky_q == instruction.k_h;
  assign last_pb = rows_left_q <= instruction.block_rows;
  assign last_ob = ob_q == instruction.oc_blocks;
  assign block_rows = last_pb ? rows_left_q : instruction.block_rows;

  always_ff @(posedge clk) begin
    if (begin_instruction) begin
      cb_q <= '0;
      kx_q <= '0;
      ky_q <= '0;
      ob_q <= '0;
      rows_left_q <= head.out_h;
    end else if (advance) begin
      cb_q <= last_cb ? '0 : cb_q + 10'd1;
      if (last_cb) kx_q <= last_kx ? '0 : kx_q + 8'd1;
      if (last_cb && last_kx) ky_q <= last_step ? '0 : ky_q + 8'd1;
      if (last_step) begin
        rows_left_q <= last_pb ? instruction.out_h : rows_left_q - instruction.block_rows - 12'd1;
        if (last_pb) ob_q <= ob_q + 6'd1;
      end
    end
  end
endmodule
