// dma_bench: tw_dma with its packed requests as single ports, for the C++ harness.

module dma_bench
  import tw_pkg::*;
(
    input  logic          clk,
    input  logic          rst,
    input  logic [7:0]    fault,
    input  logic          head_valid,
    input  logic [511:0]  head,
    output logic          pop,
    output logic          done,
    output logic [31:0]   done_signals,
    output logic          idle,
    input  logic          tick,

    output logic          sram_valid,
    output logic          sram_write,
    output logic [31:0]   sram_address,
    output logic [W-1:0]  sram_mask,
    output logic [WB-1:0] sram_write_data,
    input  logic          sram_granted,
    input  logic [WB-1:0] sram_data,

    output logic          ddr_valid,
    output logic          ddr_write,
    output logic          ddr_burst,
    output logic [39:0]   ddr_address,
    output logic [G-1:0]  ddr_mask,
    output logic [GB-1:0] ddr_write_data,
    input  logic          ddr_granted,
    input  logic [GB-1:0] ddr_data
);
  sram_request_t sram_request;
  ddr_request_t ddr_request;

  tw_dma #(.CHANNEL(1)) dut (.*);

  assign sram_valid = sram_request.valid;
  assign sram_write = sram_request.write;
  assign sram_address = 32'(sram_request.address) * W;
  assign sram_mask = sram_request.mask;
  assign sram_write_data = sram_request.data;
  assign ddr_valid = ddr_request.valid;
  assign ddr_write = ddr_request.write;
  assign ddr_burst = ddr_request.burst;
  assign ddr_address = ddr_request.address;
  assign ddr_mask = ddr_request.mask;
  assign ddr_write_data = ddr_request.data;
endmodule
