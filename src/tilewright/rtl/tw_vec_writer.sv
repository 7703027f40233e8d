// tw_vec_writer: the writing half of the vector unit. Counts the vectors in flight, lets each be
// ready VECTOR_LATENCY + 1 cycles after it was read, keeps results in a FIFO and writes them,
// oldest first. Implements "Vector unit" of docs/concepts/microarchitecture.md, writer.
module tw_vec_writer
  import tw_pkg::*;
#(
    parameter int unsigned ADDRESS_BITS,  // of a byte in SRAM
    parameter int unsigned RESULT_BITS    // of bytes of a result
) (
    input  logic                    clk,
    input  logic                    rst,
    input  logic                    start,       // the cycle of the pop
    input  logic                    complete,    // a vector was read in this cycle
    input  logic                    has_result,  // it writes something
    input  logic [ADDRESS_BITS-1:0] result_address,
    input  logic [RESULT_BITS-1:0]  result_bytes,
    input  logic                    push,        // its result, in the same order, but later
    input  logic [LANES*32-1:0]     result,
    output sram_request_t           w_request,
    input  logic                    w_granted,
    output logic                    window,      // another vector may be in flight (state)
    output logic                    none_left,   // no vector is in flight (state)
    output logic                    last_left,   // one vector is in flight (state)
    output logic                    retire       // the oldest vector is finished in this cycle
);
  localparam int unsigned DEPTH = VECTOR_LATENCY + 3;
  localparam int unsigned PLACE_BITS = $clog2(DEPTH);
  localparam int unsigned FLIGHT_BITS = $clog2(DEPTH + 1);
  localparam int unsigned DELAY_BITS = VECTOR_LATENCY > 1 ? $clog2(VECTOR_LATENCY) : 1;
  localparam int unsigned WORD_BITS = $clog2(W);

  function automatic logic [PLACE_BITS-1:0] after(input logic [PLACE_BITS-1:0] place);
    after = place == PLACE_BITS'(DEPTH - 1) ? '0 : place + 1'b1;
  endfunction

  // A ring as delay line: only one bit of it changes in a cycle, however long the latency.
  logic [VECTOR_LATENCY-1:0] delay_q;
  logic [DELAY_BITS-1:0] delay_place_q;
  wire ripe = delay_q[delay_place_q];
  logic [FLIGHT_BITS-1:0] flight_q;  // read, not retired
  logic [FLIGHT_BITS-1:0] ready_q;   // of these, ready to be written
  assign window = flight_q < FLIGHT_BITS'(DEPTH);
  assign none_left = flight_q == '0;
  assign last_left = flight_q == FLIGHT_BITS'(1);

  logic [LANES*32-1:0] results_q[DEPTH];
  logic [ADDRESS_BITS-1:0] addresses_q[DEPTH];
  logic [RESULT_BITS-1:0] bytes_q[DEPTH];
  logic [DEPTH-1:0] writes_q;
  logic [PLACE_BITS-1:0] oldest_q;
  logic [PLACE_BITS-1:0] next_vector_q;
  logic [PLACE_BITS-1:0] next_result_q;

  wire ready = ready_q != '0;
  wire [ADDRESS_BITS-1:0] address = addresses_q[oldest_q];
  wire [WORD_BITS-1:0] offset = address[WORD_BITS-1:0];
  localparam int unsigned END_BITS = $clog2(4 * LANES + W);
  wire [END_BITS-1:0] last_byte = END_BITS'(offset) + END_BITS'(bytes_q[oldest_q]) - 1'b1;
  logic [END_BITS-1:0] word_q;
  wire last_word = word_q == last_byte >> WORD_BITS;
  wire writes = writes_q[oldest_q];
  assign retire = ready && (!writes || (w_granted && last_word));

  /* verilator lint_off LATCH */  // variables of a block are no latches
  always_comb begin
    w_request = '0;
    if (ready && writes) begin
      automatic logic [WORD_BITS-1:0] last_offset;
      automatic logic [LANES*32+2*WB-1:0] around;
      last_offset = last_byte[WORD_BITS-1:0];
      around = {{WB{1'b0}}, results_q[oldest_q], {WB{1'b0}}};
      w_request.valid = 1'b1;
      w_request.write = 1'b1;
      w_request.address = address[ADDRESS_BITS-1:WORD_BITS] + WORD_ADDRESS_BITS'(word_q);
      w_request.mask = '1;
      if (word_q == '0) w_request.mask = w_request.mask << offset;
      if (last_word) begin
        w_request.mask = w_request.mask & ({W{1'b1}} >> (WORD_BITS'(W - 1) - last_offset));
      end
      w_request.data = around[(W+32'(word_q)*W-32'(offset))*8+:WB];
    end
  end
  /* verilator lint_on LATCH */

  always_ff @(posedge clk) begin
    if (complete) begin
      addresses_q[next_vector_q] <= result_address;
      bytes_q[next_vector_q] <= result_bytes;
      writes_q[next_vector_q] <= has_result;
    end
    if (push) results_q[next_result_q] <= result;
    if (rst || start) begin
      delay_q <= '0;
      delay_place_q <= '0;
      flight_q <= '0;
      ready_q <= '0;
      oldest_q <= '0;
      next_vector_q <= '0;
      next_result_q <= '0;
      word_q <= '0;
    end else begin
      delay_q[delay_place_q] <= complete;
      delay_place_q <= delay_place_q == DELAY_BITS'(VECTOR_LATENCY - 1) ? '0 : delay_place_q + 1'b1;
      flight_q <= flight_q + FLIGHT_BITS'(complete) - FLIGHT_BITS'(retire);
      ready_q <= ready_q + FLIGHT_BITS'(ripe) - FLIGHT_BITS'(retire);
      if (retire) oldest_q <= after(oldest_q);
      if (complete) next_vector_q <= after(next_vector_q);
      if (push) next_result_q <= after(next_result_q);
      if (w_request.valid && w_granted) word_q <= last_word ? '0 : word_q + 1'b1;
    end
  end
endmodule
