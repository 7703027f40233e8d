// MAC array: weight-stationary, N x N, int8 (and int4 weights), with its address generators, the
// M registers and their hand-over to the vector unit. Implements microarchitecture.md, "MAC array".
//
// Pipeline behind a granted activation word: data arrives (1), its vector is complete (2), the column
// sums (3) are added to the accumulators, which hold them one cycle later. A granted weight word:
// data arrives (1), its row is complete (2) and in the array one cycle later: in time for the vectors
// of the next step, and behind the last vectors of the step before.
module tw_mac
  import tw_pkg::*;
#(
    parameter int unsigned PE_FORM = 0  // a module for each element of the array
) (
    input logic clk,
    input logic rst,
    /* verilator lint_off UNUSEDSIGNAL */ // used only where planted faults are built
    input logic [7:0] fault,
    /* verilator lint_on UNUSEDSIGNAL */
    input logic head_valid,
    input logic [511:0] head,
    output logic pop,
    output logic done,
    output logic [31:0] done_signals,
    output logic idle,
    output sram_request_t act_request,
    input logic act_granted,
    input logic [WB-1:0] act_data,
    output sram_request_t wgt_request,
    input logic wgt_granted,
    input logic [WB-1:0] wgt_data,
    input logic [1:0] half_freed,
    output logic [1:0] half_full,
    input logic m_half,
    input logic [$clog2(HALF_ROWS)-1:0] m_row,
    output logic [N*32-1:0] m_data,
    output logic accumulator_stall
);
  localparam int unsigned OFFSET_BITS = $clog2(W);
  localparam int unsigned ROW_BITS = $clog2(HALF_ROWS);
  localparam int unsigned SUM_BITS = 16 + $clog2(N);
  localparam int unsigned LATENCY_BITS = $clog2(MAC_LATENCY + 1);
  localparam int unsigned DEPTH = 3;
  if (MAC_LATENCY < DEPTH) begin : g_too_fast
    $error("mac_latency must be 3 or more: the depth of the MAC array's pipeline");
  end

  wire f_stall_prime_k = FAULTS_BUILT && fault == FAULT_STALL_PRIME_K;
  wire f_swap_early = FAULTS_BUILT && fault == FAULT_SWAP_EARLY;
  wire f_acc_not_cleared = FAULTS_BUILT && fault == FAULT_ACC_NOT_CLEARED;
  wire f_weight_sign = FAULTS_BUILT && fault == FAULT_WEIGHT_SIGN;
  wire f_saturation = FAULTS_BUILT && fault == FAULT_SATURATION;

  typedef enum logic [1:0] {
    IDLE,
    LOAD,
    RUN,
    LAT
  } state_t;
  state_t state_q;
  /* verilator lint_off UNUSEDSIGNAL */ // opcode, waits and R registers concern the sequencer
  mac_conv_t head_fields, instruction_q;
  /* verilator lint_on UNUSEDSIGNAL */
  assign head_fields = mac_conv_t'(head);
  logic [LATENCY_BITS-1:0] latency_q;
  logic int4;
  assign int4 = HAS_INT4 != 0 && instruction_q.dtype == DTYPE_INT4;

  // The current block's half, and whether the instruction filled that half before.
  logic half_q;
  logic [1:0] used_q;
  logic [1:0] pending_q, full_q;
  logic [LATENCY_BITS-1:0] wait_q[2];  // until a pending half is full
  logic half_free;
  assign half_free = !pending_q[half_q] && !full_q[half_q];
  assign half_full = full_q;

  assign idle = state_q == IDLE;
  assign pop = idle && head_valid;
  assign done = state_q == LAT && latency_q == LATENCY_BITS'(1);
  assign done_signals = instruction_q.signal_mask;
  assign accumulator_stall = state_q == RUN && !half_free;

  // Steps.
  logic run, load, step_end, advance, block_end;
  logic read_finished, load_finished, first_step, last_step, last;
  assign run = state_q == RUN && half_free;
  assign load = state_q == LOAD || run;
  assign step_end = run && read_finished && load_finished;
  assign advance = step_end || (state_q == LOAD && load_finished);
  assign block_end = step_end && last_step;

  logic act_first, act_last, wgt_last, wgt_set;
  logic [OFFSET_BITS-1:0] act_offset, wgt_offset;
  logic [6:0] act_word, wgt_word;
  logic [7:0] act_bytes, wgt_bytes;
  logic [$clog2(N)-1:0] wgt_row;
  logic [ROW_BITS-1:0] act_pixel;

  tw_mac_reader reader (
      .clk,
      .begin_instruction(pop),
      .head(head_fields),
      .instruction(instruction_q),
      .run,
      .step_end,
      .request(act_request),
      .granted(act_granted),
      .finished(read_finished),
      .first_step,
      .last_step,
      .last,
      .first_word(act_first),
      .last_word(act_last),
      .offset(act_offset),
      .word(act_word),
      .bytes(act_bytes),
      .pixel(act_pixel)
  );

  tw_mac_loader loader (
      .clk,
      .rst,
      .begin_instruction(pop),
      .head(head_fields),
      .instruction(instruction_q),
      .int4,
      .run(load),
      .advance,
      .drop_stalled(f_stall_prime_k),
      .request(wgt_request),
      .granted(wgt_granted),
      .finished(load_finished),
      .last_word(wgt_last),
      .offset(wgt_offset),
      .word(wgt_word),
      .bytes(wgt_bytes),
      .row(wgt_row),
      .set(wgt_set)
  );

  always_ff @(posedge clk) begin
    if (pop) instruction_q <= head_fields;
    if (rst) begin
      state_q <= IDLE;
    end else begin
      unique case (state_q)
        IDLE: if (pop) state_q <= LOAD;
        LOAD: if (load_finished) state_q <= RUN;
        RUN:
        if (step_end && last) begin
          state_q   <= LAT;
          latency_q <= LATENCY_BITS'(MAC_LATENCY);
        end
        LAT: begin
          latency_q <= latency_q - LATENCY_BITS'(1);
          if (done) state_q <= IDLE;
        end
      endcase
    end
  end

  // Halves.
  always_ff @(posedge clk) begin
    if (pop) begin
      half_q <= head_fields.m_half;
      used_q <= '0;
    end else if (block_end) begin
      half_q <= !half_q;
      used_q[half_q] <= 1'b1;
    end
    for (int unsigned h = 0; h < 2; h++) begin
      if (rst) begin
        pending_q[h] <= 1'b0;
        full_q[h] <= 1'b0;
      end else begin
        if (block_end && instruction_q.push && half_q == h[0]) begin
          pending_q[h] <= 1'b1;
          wait_q[h] <= LATENCY_BITS'(MAC_LATENCY);
        end else if (pending_q[h]) begin
          wait_q[h] <= wait_q[h] - LATENCY_BITS'(1);
          if (wait_q[h] == LATENCY_BITS'(1)) begin
            pending_q[h] <= 1'b0;
            full_q[h] <= 1'b1;
          end
        end
        if (half_freed[h]) full_q[h] <= 1'b0;
      end
    end
  end

  // What goes with a word granted in the cycle before, its vector, and its sums.
  typedef struct packed {
    logic half;
    logic [ROW_BITS-1:0] row;
    logic clear;
  } place_t;
  logic act_valid_q, act_first_q, act_last_q, wgt_valid_q, wgt_last_q, wgt_set_q, row_set_q;
  logic [OFFSET_BITS-1:0] act_offset_q, wgt_offset_q;
  logic [6:0] act_word_q, wgt_word_q;
  logic [7:0] act_bytes_q, wgt_bytes_q;
  logic [$clog2(N)-1:0] wgt_row_q, row_q;
  place_t act_place_q, vector_place_q, sum_place_q;
  logic vector_full, row_full, sum_valid_q;
  logic set_q;  // of weights the vector is multiplied with

  always_ff @(posedge clk) begin
    act_valid_q <= act_granted && !rst;
    wgt_valid_q <= wgt_granted && !rst;
    sum_valid_q <= vector_full && !rst;
    if (act_granted) begin
      act_first_q <= act_first;
      act_last_q <= act_last;
      act_offset_q <= act_offset;
      act_word_q <= act_word;
      act_bytes_q <= act_bytes;
      act_place_q.half <= half_q;
      act_place_q.row <= act_pixel;
      act_place_q.clear <= first_step && !instruction_q.accumulate
          && !(f_acc_not_cleared && used_q[half_q]);
    end
    if (wgt_granted) begin
      wgt_last_q <= wgt_last;
      wgt_offset_q <= wgt_offset;
      wgt_word_q <= wgt_word;
      wgt_bytes_q <= wgt_bytes;
      wgt_row_q <= wgt_row;
      wgt_set_q <= wgt_set;
    end
    if (act_valid_q) vector_place_q <= act_place_q;
    if (vector_full) sum_place_q <= vector_place_q;
    if (wgt_valid_q) begin
      row_q <= wgt_row_q;
      row_set_q <= wgt_set_q;
    end
    // The sets swap when a step's first activations arrive. The loader's first set is 0.
    if (rst) set_q <= 1'b1;
    else if (f_swap_early ? act_granted && act_first : act_valid_q && act_first_q) set_q <= !set_q;
  end

  logic [7:0] vector[N], row_bytes[N];
  tw_mac_align activations (
      .clk,
      .rst,
      .valid(act_valid_q),
      .data(act_data),
      .offset(act_offset_q),
      .word(act_word_q),
      .last(act_last_q),
      .bytes(act_bytes_q),
      .full_q(vector_full),
      .vector_q(vector)
  );
  tw_mac_align weights (
      .clk,
      .rst,
      .valid(wgt_valid_q),
      .data(wgt_data),
      .offset(wgt_offset_q),
      .word(wgt_word_q),
      .last(wgt_last_q),
      .bytes(wgt_bytes_q),
      .full_q(row_full),
      .vector_q(row_bytes)
  );

  logic signed [SUM_BITS-1:0] sum[N];
  tw_mac_array #(
      .PE_FORM(PE_FORM)
  ) array (
      .clk,
      .row_full,
      .row_bytes,
      .row(row_q),
      .row_set(row_set_q),
      .row_int4(int4),
      .vector_full,
      .vector,
      .set(set_q),
      .diag(instruction_q.diag),
      .weight_unsigned(f_weight_sign),
      .sum_q(sum)
  );

  tw_mac_registers registers (
      .clk,
      .add(sum_valid_q),
      .half(sum_place_q.half),
      .row(sum_place_q.row),
      .clear(sum_place_q.clear),
      .saturate((MAC_SATURATES != 0) ^ f_saturation),
      .sum,
      .read_half(m_half),
      .read_row(m_row),
      .read_data(m_data)
  );
endmodule
