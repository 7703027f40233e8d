// tw_vec: the vector unit. Pops an instruction, and is busy with it until its last vector retires.
// Implements "Vector unit" and "Engines: common" of docs/concepts/microarchitecture.md: a reader
// and a writer side by side on a sequence of vectors, the lanes between them. Computes int8; fp16
// is not built.
module tw_vec
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
    output sram_request_t                a_request,
    input  logic                         a_granted,
    input  logic [WB-1:0]                a_data,
    output sram_request_t                b_request,
    input  logic                         b_granted,
    input  logic [WB-1:0]                b_data,
    output sram_request_t                w_request,
    input  logic                         w_granted,
    input  logic [1:0]                   half_full,
    output logic [1:0]                   half_freed,
    output logic                         m_half,
    output logic [$clog2(HALF_ROWS)-1:0] m_row,
    input  logic [N*32-1:0]              m_data,
    output logic                         accumulator_stall
);
  localparam int unsigned ADDRESS_BITS = WORD_ADDRESS_BITS + $clog2(W);
  // The largest operand is a block of parameters or a table; B's are at most one element a lane,
  // or what a layer normalisation needs of each.
  localparam int unsigned BLOCK_BYTES = 9 * LANES > 256 ? 9 * LANES : 256;
  localparam int unsigned COUNT_BITS = $clog2(BLOCK_BYTES + W);
  localparam int unsigned A_BITS = $clog2((BLOCK_BYTES + W - 2) / W + 1);
  localparam int unsigned B_BYTES = HAS_ROWS ? 6 * LANES : LANES;
  localparam int unsigned B_BITS = $clog2((B_BYTES + W - 2) / W + 1);
  localparam int unsigned CHUNK_BITS = $clog2(LANES + 1);
  localparam int unsigned RESULT_BITS = $clog2(4 * LANES + 1);

  logic run_q;
  logic [31:0] signals_q;
  assign idle = !run_q;
  assign pop = idle && head_valid;

  logic window, reading, half_awaited;
  logic a_take, b_take, item_done, item_first, complete;
  logic [A_BITS-1:0] a_word;
  logic [B_BITS-1:0] b_word;
  logic [$clog2(W)-1:0] a_offset, b_offset;
  logic [5:0] entry;
  logic [6:0] v_register;
  logic signed [31:0] weight;
  logic chunk_first, pass_first, pass_last, row_ready;
  logic [CHUNK_BITS-1:0] chunk;
  logic has_result;
  logic [ADDRESS_BITS-1:0] result_address;
  logic [RESULT_BITS-1:0] result_bytes;
  logic push;
  logic [LANES*32-1:0] result;
  logic none_left, last_left, retire;

  // A register, so that the lanes depend on no input of the chip directly (faster simulation).
  logic [7:0] fault_q;
  if (FAULTS_BUILT) begin : g_fault
    always_ff @(posedge clk) fault_q <= fault;
  end else begin : g_no_fault
    assign fault_q = fault;
  end

  tw_vec_reader #(
      .ADDRESS_BITS(ADDRESS_BITS), .COUNT_BITS(COUNT_BITS), .A_BITS(A_BITS), .B_BITS(B_BITS),
      .CHUNK_BITS(CHUNK_BITS), .RESULT_BITS(RESULT_BITS)
  ) reader (.fault(fault_q), .start(pop), .*);

  tw_vec_lanes #(
      .BLOCK_BYTES(BLOCK_BYTES), .B_BYTES(B_BYTES), .A_BITS(A_BITS), .B_BITS(B_BITS),
      .CHUNK_BITS(CHUNK_BITS)
  ) lanes (.fault(fault_q), .start(pop), .*);

  tw_vec_writer #(
      .ADDRESS_BITS(ADDRESS_BITS), .RESULT_BITS(RESULT_BITS)
  ) writer (.start(pop), .*);

  assign done = run_q && retire && last_left && !reading;
  assign done_signals = done ? signals_q : '0;
  // The half is not full, and nothing else moved: no word was written.
  assign accumulator_stall = half_awaited && !(w_request.valid && w_granted);

  always_ff @(posedge clk) begin
    if (rst) begin
      run_q <= 1'b0;
    end else if (pop) begin
      run_q <= 1'b1;
      signals_q <= head[71:40];
    end else if (done) begin
      run_q <= 1'b0;
    end
  end
endmodule
