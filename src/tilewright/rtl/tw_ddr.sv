// tw_ddr: arbitration of the DDR port between the DMA channels and the instruction fetch.
//
// Implements "DDR" of docs/concepts/microarchitecture.md: at most one unit in a cycle of the DDR
// clock's enable, in cyclic order; a channel in burst mode keeps the port to the end of its burst.

module tw_ddr import tw_pkg::*; (
    input  logic               clk,
    input  logic               rst,
    input  logic               run,
    input  ddr_request_t [4:0] request,  // channels 0..3, fetch 4
    output logic [4:0]         granted,
    // Memory; read data come in the cycle after.
    output logic               mem_valid,
    output logic               mem_write,
    output logic               mem_code,  // fetch: the address counts from the code's start
    output logic [39:0]        mem_address,
    output logic [G-1:0]       mem_mask,
    output logic [GB-1:0]      mem_data
);
  logic beat;
  tw_enable #(.MHZ(DDR_MHZ)) ddr_enable (.clk, .rst, .run, .enable(beat));

  logic [4:0] behind_q;  // the requesters after the one granted last
  logic [4:0] lock_q;    // one-hot, or none
  logic [4:0] lock;

  always_comb begin
    granted = '0;
    for (int unsigned i = 0; i < 5; i++) granted[i] = beat && request[i].valid;
    if ((granted & lock_q) != '0) granted = lock_q;
    else begin
      if ((granted & behind_q) != '0) granted &= behind_q;
      granted &= ~granted + 1'b1;
    end
  end

  always_comb begin
    mem_valid = granted != '0;
    mem_code = granted[4];
    mem_write = 1'b0;
    mem_address = '0;
    mem_mask = '0;
    mem_data = '0;
    lock = '0;
    for (int unsigned i = 0; i < 5; i++) begin
      if (granted[i]) begin
        mem_write = request[i].write;
        mem_address = request[i].address;
        mem_mask = request[i].mask;
        mem_data = request[i].data;
        lock[i] = i != 4 && request[i].burst
            && ((32'(request[i].address) + G) & (BURST - 1)) != '0;
      end
    end
  end

  always_ff @(posedge clk) begin
    if (rst) begin
      behind_q <= '0;
      lock_q <= '0;
    end else if (granted != '0) begin
      behind_q <= ~(granted | (granted - 1'b1));
      lock_q <= lock;
    end
  end
endmodule
