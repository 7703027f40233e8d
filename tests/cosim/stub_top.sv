// A chip that only counts: the smallest thing that builds with the harness.
module tw_top import tw_pkg::*; (
    input logic clk, input logic rst, input logic run,
    input logic config_write, input logic [4:0] config_register, input logic [39:0] config_value,
    input logic [31:0] code_length, input logic [7:0] fault,
    output logic mem_valid, output logic mem_write, output logic mem_code,
    output logic [39:0] mem_address, output logic [G-1:0] mem_mask, output logic [GB-1:0] mem_data,
    input logic [GB-1:0] mem_read_data,
    output logic finished, output logic trapped, output logic [63:0] target_digest,
    output logic dispatch_valid, output logic [2:0] dispatch_engine,
    output logic [5:0] start, output logic [5:0] done, output logic active,
    output logic [5:0] bank_stall, output logic [5:0] ddr_stall,
    output logic [5:0] accumulator_stall, output logic [5:0] queue_valid,
    output logic [5:0] engine_idle, output logic [31:0] semaphore_zero,
    input logic [5:0] counter_select, output logic [47:0] counter_value,
    input logic [WORD_ADDRESS_BITS-1:0] debug_address, output logic [WB-1:0] debug_data
);
  logic [47:0] cycle_q;
  always_ff @(posedge clk) cycle_q <= rst || !run ? '0 : cycle_q + 1'b1;
  assign {mem_valid, mem_write, mem_code, mem_address, mem_mask, mem_data, trapped} = '0;
  assign {start, done, bank_stall, ddr_stall, accumulator_stall, queue_valid} = '0;
  assign engine_idle = '1;
  assign semaphore_zero = '1;
  assign target_digest = TARGET_DIGEST;
  assign finished = cycle_q == 48'd9;
  assign dispatch_valid = finished;
  assign dispatch_engine = 3'd6;
  assign active = run;
  assign counter_value = cycle_q + 48'(counter_select);
  assign debug_data = WB'(debug_address);
endmodule
