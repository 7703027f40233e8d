// tw_fetch: instruction fetch and the instruction buffer.
//
// Implements fetch of "Sequencer and fetch" of docs/concepts/microarchitecture.md: blocks of up to
// 16 instructions into a ring of 64, and the flush when a loop's body is no longer in it.
// Wires that depend on inputs of the chip are kept few: a simulator evaluates them twice a cycle.

module tw_fetch import tw_pkg::*; (
    input  logic         clk,
    input  logic         rst,
    input  logic         run,          // low: nothing moves
    input  logic         stopped,      // halted or trapped (state)
    input  logic [31:0]  code_length,  // instructions
    input  logic [31:0]  pc,
    input  logic         jump,         // back to `target` in this cycle
    input  logic [31:0]  target,
    output logic         ready,        // the instruction at `pc` is readable
    output logic [511:0] word,         // it; zero when not ready
    output logic         counting,     // the latency counter runs
    output ddr_request_t request,
    input  logic         granted,
    input  logic [GB-1:0] data
);
  localparam int unsigned BLOCK = 16;
  localparam int unsigned RING = 64;
  localparam int unsigned WAIT_BITS = $clog2(DMA_LATENCY + 1);
  localparam int unsigned UNIT_BITS = $clog2(BLOCK * 64 / G + 2);
  localparam int unsigned UNIT_WORDS = G > 64 ? G / 64 : 1;  // instructions a unit can complete

  logic [511:0] buffer_q[RING];
  logic [31:0] fetch_end_q;  // positions below are fetched or in flight
  logic [31:0] valid_end_q;  // positions below have arrived
  logic [31:0] base_q;       // lowest position valid since the last flush

  // The block in flight.
  logic busy_q;
  logic [WAIT_BITS-1:0] wait_q;
  logic [39:0] address_q;              // next unit
  logic [UNIT_BITS-1:0] units_left_q;
  logic [4:0] words_left_q;

  // The unit granted in the cycle before.
  logic arriving_q;
  logic [5:0] arriving_slot_q;
  logic [4:0] arriving_words_q;  // instructions it completes

  // Decision.
  wire [31:0] rest = code_length - fetch_end_q;
  wire [4:0] size = rest > 32'(BLOCK) ? 5'(BLOCK) : rest[4:0];
  // Nothing is decided in the cycle of a jump: `pc` is about to move backwards.
  wire decide = !stopped && !busy_q && rest != '0 && !jump
      && fetch_end_q - pc + 32'(size) <= 32'(RING);

  wire [31:0] oldest = fetch_end_q - base_q > 32'(RING) ? fetch_end_q - 32'(RING) : base_q;
  wire flush = jump && target < oldest;

  assign counting = busy_q && wait_q != '0;

  always_comb begin
    request = '0;
    request.valid = busy_q && wait_q == '0 && !stopped;
    request.address = address_q;
  end

  assign ready = pc < valid_end_q && !stopped;

  always_comb begin
    word = '0;
    if (ready) word = buffer_q[pc[5:0]];
  end

  // Instructions a unit granted now completes.
  logic [4:0] completes;
  if (G > 64) begin : gen_wide_count
    assign completes = words_left_q < 5'(UNIT_WORDS) ? words_left_q : 5'(UNIT_WORDS);
  end else begin : gen_narrow_count
    assign completes = 5'(address_q[5:0] == 6'(64 - G));
  end

  always_ff @(posedge clk) begin
    if (rst) begin
      fetch_end_q <= '0;
      valid_end_q <= '0;
      base_q <= '0;
      busy_q <= 1'b0;
      wait_q <= '0;
      address_q <= '0;
      units_left_q <= '0;
      words_left_q <= '0;
      arriving_q <= 1'b0;
      arriving_slot_q <= '0;
      arriving_words_q <= '0;
    end else begin
      arriving_q <= granted && !flush;
      if (granted) begin
        address_q <= address_q + 40'(G);
        units_left_q <= units_left_q - 1'b1;
        words_left_q <= words_left_q - completes;
        arriving_slot_q <= address_q[11:6];
        arriving_words_q <= completes;
        if (units_left_q == UNIT_BITS'(1)) busy_q <= 1'b0;
      end
      if (counting) wait_q <= wait_q - 1'b1;
      if (arriving_q) valid_end_q <= valid_end_q + 32'(arriving_words_q);
      if (decide && run) begin
        busy_q <= 1'b1;
        wait_q <= WAIT_BITS'(DMA_LATENCY);
        fetch_end_q <= fetch_end_q + 32'(size);
        address_q <= {2'b0, fetch_end_q, 6'b0};
        units_left_q <= UNIT_BITS'((32'(size) * 64 + G - 1) / G);
        words_left_q <= size;
      end
      if (flush) begin
        base_q <= target;
        fetch_end_q <= target;
        valid_end_q <= target;
        busy_q <= 1'b0;
      end
    end
  end

  if (G > 64) begin : gen_wide_write
    always_ff @(posedge clk) begin
      if (arriving_q && !flush)
        for (int unsigned i = 0; i < UNIT_WORDS; i++)
          if (5'(i) < arriving_words_q) buffer_q[arriving_slot_q + 6'(i)] <= data[512*i+:512];
    end
  end else if (G == 64) begin : gen_whole_write
    always_ff @(posedge clk) begin
      if (arriving_q && !flush) buffer_q[arriving_slot_q] <= data;
    end
  end else begin : gen_narrow_write
    logic [511-GB:0] collected_q;  // the units of an instruction before its last
    always_ff @(posedge clk) begin
      if (arriving_q) begin
        automatic logic [511:0] collected = {data, collected_q};
        collected_q <= collected[511:GB];
        if (!flush && arriving_words_q != '0) buffer_q[arriving_slot_q] <= collected;
      end
    end
  end
endmodule
