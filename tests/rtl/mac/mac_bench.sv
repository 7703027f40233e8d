// The MAC array with plain ports, and beside it (PAIR) the form with a module for each element.
module mac_bench
  import tw_pkg::*;
#(
    parameter int unsigned PAIR = 0
) (
    input logic clk,
    input logic rst,
    input logic [7:0] fault,
    input logic head_valid,
    input logic [511:0] head,
    output logic pop,
    output logic done,
    output logic [31:0] done_signals,
    output logic idle,
    output logic act_valid,
    output logic [31:0] act_address,
    input logic act_granted,
    input logic [WB-1:0] act_data,
    output logic wgt_valid,
    output logic [31:0] wgt_address,
    input logic wgt_granted,
    input logic [WB-1:0] wgt_data,
    output logic writes,  // a request that is no plain read
    input logic [1:0] half_freed,
    output logic [1:0] half_full,
    input logic m_half,
    input logic [$clog2(HALF_ROWS)-1:0] m_row,
    output logic [N*32-1:0] m_data,
    output logic accumulator_stall,
    output logic differs  // the two forms' outputs
);
  localparam int unsigned FORMS = PAIR != 0 ? 2 : 1;
  // verilator lint_off UNOPTFLAT
  typedef struct packed {
    logic pop;
    logic done;
    logic [31:0] done_signals;
    logic idle;
    sram_request_t act;
    sram_request_t wgt;
    logic [1:0] half_full;
    logic [N*32-1:0] m_data;
    logic accumulator_stall;
  } outputs_t;
  outputs_t out[FORMS];

  for (genvar form = 0; form < FORMS; form++) begin : g_form
    tw_mac #(
        .PE_FORM(form)
    ) mac (
        .clk,
        .rst,
        .fault,
        .head_valid,
        .head,
        .pop(out[form].pop),
        .done(out[form].done),
        .done_signals(out[form].done_signals),
        .idle(out[form].idle),
        .act_request(out[form].act),
        .act_granted,
        .act_data,
        .wgt_request(out[form].wgt),
        .wgt_granted,
        .wgt_data,
        .half_freed,
        .half_full(out[form].half_full),
        .m_half,
        .m_row,
        .m_data(out[form].m_data),
        .accumulator_stall(out[form].accumulator_stall)
    );
  end

  assign pop = out[0].pop;
  assign done = out[0].done;
  assign done_signals = out[0].done_signals;
  assign idle = out[0].idle;
  assign act_valid = out[0].act.valid;
  assign act_address = 32'(out[0].act.address);
  assign wgt_valid = out[0].wgt.valid;
  assign wgt_address = 32'(out[0].wgt.address);
  assign writes = out[0].act.write || out[0].wgt.write;
  assign half_full = out[0].half_full;
  assign m_data = out[0].m_data;
  assign accumulator_stall = out[0].accumulator_stall;
  assign differs = out[0] != out[FORMS-1];
endmodule
