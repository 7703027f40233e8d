// tw_queue: an engine's instruction queue.
//
// Implements the queues of "Sequencer and fetch" of docs/concepts/microarchitecture.md: a ring of
// QUEUE_DEPTH words whose oldest is also kept in a register, so that the engine sees it without a
// read of the memory. A word pushed in a cycle is at the head in the next one at the earliest.

module tw_queue import tw_pkg::*; #(
    parameter bit LOSES_LAST_SLOT = 1'b0  // the queue FAULT_QUEUE_SLOT is planted in
) (
    input  logic         clk,
    input  logic         rst,
    input  logic [7:0]   fault,
    input  logic         push,   // only when not full
    input  logic [511:0] word,
    input  logic         pop,    // only when valid
    output logic         valid,
    output logic         full,
    output logic [511:0] head
);
  wire f_queue_slot = FAULTS_BUILT && LOSES_LAST_SLOT && fault == FAULT_QUEUE_SLOT;

  localparam int unsigned SLOT_BITS = $clog2(QUEUE_DEPTH);
  localparam int unsigned COUNT_BITS = $clog2(QUEUE_DEPTH + 1);
  typedef logic [SLOT_BITS-1:0] slot_t;

  logic [511:0] memory_q[QUEUE_DEPTH];
  logic [511:0] head_q;
  logic [COUNT_BITS-1:0] count_q;
  slot_t read_q;  // the slot of the head
  slot_t write_q;

  function automatic slot_t after(input slot_t slot);
    after = slot == slot_t'(QUEUE_DEPTH - 1) ? '0 : slot + 1'b1;
  endfunction

  wire lost = f_queue_slot && write_q == slot_t'(QUEUE_DEPTH - 1);
  // Whether the word pushed now is the head of the next cycle.
  wire passes = push && (count_q == '0 || (pop && count_q == COUNT_BITS'(1)));

  assign valid = count_q != '0;
  assign full = count_q == COUNT_BITS'(QUEUE_DEPTH);
  assign head = head_q;

  always_ff @(posedge clk) begin
    if (rst) begin
      count_q <= '0;
      read_q <= '0;
      write_q <= '0;
    end else begin
      if (push && !pop) count_q <= count_q + 1'b1;
      if (pop && !push) count_q <= count_q - 1'b1;
      if (pop) read_q <= after(read_q);
      if (push) write_q <= after(write_q);
    end
  end

  always_ff @(posedge clk) begin
    if (push && !lost) memory_q[write_q] <= word;
    if (passes) head_q <= lost ? memory_q[write_q] : word;
    else if (pop) head_q <= memory_q[after(read_q)];
  end
endmodule
