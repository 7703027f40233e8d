// Shows the vector unit's packed requests field by field, so that C++ needs no bit positions.
module bench
  import tw_pkg::*;
(
    input  logic                         clk,
    input  logic                         rst,
    input  logic [7:0]                   fault,
    input  logic                         head_valid,
    input  logic [511:0]                 head,
    output logic                         pop,
    output logic                         done,
    output logic [31:0]                  done_signals,
    output logic                         idle,
    output logic                         a_valid,
    output logic                         a_write,
    output logic [WORD_ADDRESS_BITS-1:0] a_address,
    input  logic                         a_granted,
    input  logic [WB-1:0]                a_data,
    output logic                         b_valid,
    output logic                         b_write,
    output logic [WORD_ADDRESS_BITS-1:0] b_address,
    input  logic                         b_granted,
    input  logic [WB-1:0]                b_data,
    output logic                         w_valid,
    output logic                         w_write,
    output logic [WORD_ADDRESS_BITS-1:0] w_address,
    output logic [W-1:0]                 w_mask,
    output logic [WB-1:0]                w_data,
    input  logic                         w_granted,
    input  logic [1:0]                   half_full,
    output logic [1:0]                   half_freed,
    output logic                         m_half,
    output logic [$clog2(HALF_ROWS)-1:0] m_row,
    input  logic [N*32-1:0]              m_data,
    output logic                         accumulator_stall
);
  sram_request_t a_request, b_request, w_request;
  assign {a_valid, a_write, a_address} = {a_request.valid, a_request.write, a_request.address};
  assign {b_valid, b_write, b_address} = {b_request.valid, b_request.write, b_request.address};
  assign {w_valid, w_write, w_address} = {w_request.valid, w_request.write, w_request.address};
  assign w_mask = w_request.mask;
  assign w_data = w_request.data;
  tw_vec dut (.*);
endmodule
