// tw_dma_walk: position of a DMA instruction in the runs of one memory side.
//
// Goes over the runs (i3, i2, i1 from the outside in) and the bytes of each run, `bytes` at a time,
// never across a run's end. Addresses are sums of strides only: one adder for the position in a
// run, one for the next run's start. Implements "Order of runs" of "DMA channel" in
// docs/concepts/microarchitecture.md; the source, the mover's source side and its sink side each
// have one.

module tw_dma_walk (
    input  logic        clk,
    input  logic        load,       // set to the first byte of the first run
    input  logic [39:0] base,
    input  logic [20:0] run_bytes,
    input  logic [14:0] last1,      // counts of the dimensions less one
    input  logic [14:0] last2,
    input  logic [11:0] last3,
    input  logic [31:0] stride1,
    input  logic [31:0] stride2,
    input  logic [31:0] stride3,
    input  logic        wrap,       // planted fault: no carry out of bit 11 within a run
    input  logic        step,       // go on by `bytes`, at most `left`
    input  logic [8:0]  bytes,
    output logic [39:0] address,
    output logic [20:0] left,       // bytes of the run from `address` on
    output logic [14:0] index1,
    output logic [14:0] index2,
    output logic        final_step  // a step by `bytes` would be the last
);
  logic [39:0] address_q, start1_q, start2_q, start3_q;
  logic [20:0] left_q;
  logic [14:0] index1_q, index2_q;
  logic [11:0] index3_q;

  wire run_ends = left_q == 21'(bytes);
  wire ends1 = index1_q == last1;
  wire ends2 = ends1 && index2_q == last2;
  wire ends3 = ends2 && index3_q == last3;

  logic [39:0] ahead, start, next_start;
  logic [31:0] stride;

  always_comb begin
    ahead = address_q + 40'(bytes);
    if (wrap) ahead[39:12] = address_q[39:12];
    if (ends2) begin
      start = start3_q;
      stride = stride3;
    end else if (ends1) begin
      start = start2_q;
      stride = stride2;
    end else begin
      start = start1_q;
      stride = stride1;
    end
    next_start = start + 40'(stride);
  end

  always_ff @(posedge clk) begin
    if (load) begin
      address_q <= base;
      start1_q <= base;
      start2_q <= base;
      start3_q <= base;
      left_q <= run_bytes;
      index1_q <= '0;
      index2_q <= '0;
      index3_q <= '0;
    end else if (step && !run_ends) begin
      address_q <= ahead;
      left_q <= left_q - 21'(bytes);
    end else if (step) begin
      address_q <= next_start;
      left_q <= run_bytes;
      start1_q <= next_start;
      index1_q <= ends1 ? '0 : index1_q + 15'd1;
      if (ends1) begin
        start2_q <= next_start;
        index2_q <= ends2 ? '0 : index2_q + 15'd1;
      end
      if (ends2) begin
        start3_q <= next_start;
        index3_q <= index3_q + 12'd1;
      end
    end
  end

  assign address = address_q;
  assign left = left_q;
  assign index1 = index1_q;
  assign index2 = index2_q;
  assign final_step = run_ends && ends3;
endmodule
