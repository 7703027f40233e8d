// tw_counters: performance counters: what each engine's cycles went into, and all cycles.
//
// Implements "Counters" of docs/concepts/microarchitecture.md. Selection: engine * 8 + 0 busy,
// 1 waiting for a bank, 2 for DDR, 3 for accumulators; 48 all cycles.

module tw_counters import tw_pkg::*; (
    input  logic        clk,
    input  logic        rst,
    input  logic        count,  // the machine runs in this cycle
    input  logic [5:0]  engine_idle,
    input  logic [5:0]  bank_stall,
    input  logic [5:0]  ddr_stall,
    input  logic [5:0]  accumulator_stall,
    input  logic [5:0]  select,
    output logic [47:0] value
);
  logic [47:0] count_q[24];  // engine * 4 + kind
  logic [47:0] cycles_q;

  function automatic logic [4:0] place(
      input logic [2:0] engine, input logic bank, input logic ddr, input logic accumulator);
    place = {engine, bank ? 2'd1 : ddr ? 2'd2 : accumulator ? 2'd3 : 2'd0};
  endfunction

  always_ff @(posedge clk) begin
    if (rst) begin
      cycles_q <= '0;
      for (int unsigned i = 0; i < 24; i++) count_q[i] <= '0;
    end else if (count) begin
      cycles_q <= cycles_q + 1'b1;
      for (int unsigned e = 0; e < 6; e++) begin
        if (!engine_idle[e])
          count_q[place(3'(e), bank_stall[e], ddr_stall[e], accumulator_stall[e])] <=
              count_q[place(3'(e), bank_stall[e], ddr_stall[e], accumulator_stall[e])] + 1'b1;
      end
    end
  end

  always_comb begin
    value = '0;
    if (select == 6'd48) value = cycles_q;
    else if (select[5:3] < 3'd6 && !select[2]) value = count_q[{select[5:3], select[1:0]}];
  end
endmodule
