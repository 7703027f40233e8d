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
  logic [47:0] busy_q[6];
  logic [47:0] bank_q[6];
  logic [47:0] ddr_q[6];
  logic [47:0] accumulator_q[6];
  logic [47:0] cycles_q;

  always_ff @(posedge clk) begin
    if (rst) begin
      cycles_q <= '0;
      for (int unsigned e = 0; e < 6; e++) begin
        busy_q[e] <= '0;
        bank_q[e] <= '0;
        ddr_q[e] <= '0;
        accumulator_q[e] <= '0;
      end
    end else if (count) begin
      cycles_q <= cycles_q + 1'b1;
      for (int unsigned e = 0; e < 6; e++) begin
        if (!engine_idle[e]) begin
          if (bank_stall[e]) bank_q[e] <= bank_q[e] + 1'b1;
          else if (ddr_stall[e]) ddr_q[e] <= ddr_q[e] + 1'b1;
          else if (accumulator_stall[e]) accumulator_q[e] <= accumulator_q[e] + 1'b1;
          else busy_q[e] <= busy_q[e] + 1'b1;
        end
      end
    end
  end

  always_comb begin
    value = '0;
    if (select == 6'd48) value = cycles_q;
    for (int unsigned e = 0; e < 6; e++) begin
      if (select[5:3] == 3'(e)) begin
        case (select[2:0])
          3'd0: value = busy_q[e];
          3'd1: value = bank_q[e];
          3'd2: value = ddr_q[e];
          3'd3: value = accumulator_q[e];
          default: ;
        endcase
      end
    end
  end
endmodule
