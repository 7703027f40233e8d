// tw_top: the machine: sequencer, queues, semaphores, engines, SRAM, DDR port, counters.
//
// Ports: "Modules of the RTL" of docs/concepts/microarchitecture.md. Only wiring and what the log
// shows; `fault` passes through a register, since it must not change while the machine runs.

module tw_top import tw_pkg::*; (
    input  logic                         clk,
    input  logic                         rst,
    input  logic                         run,
    input  logic                         config_write,
    input  logic [4:0]                   config_register,
    input  logic [39:0]                  config_value,
    input  logic [31:0]                  code_length,
    input  logic [7:0]                   fault,
    output logic                         mem_valid,
    output logic                         mem_write,
    output logic                         mem_code,
    output logic [39:0]                  mem_address,
    output logic [G-1:0]                 mem_mask,
    output logic [GB-1:0]                mem_data,
    input  logic [GB-1:0]                mem_read_data,
    output logic                         finished,
    output logic                         trapped,
    output logic [63:0]                  target_digest,
    output logic                         dispatch_valid,
    output logic [2:0]                   dispatch_engine,
    output logic [5:0]                   start,
    output logic [5:0]                   done,
    output logic                         active,
    output logic [5:0]                   bank_stall,
    output logic [5:0]                   ddr_stall,
    output logic [5:0]                   accumulator_stall,
    output logic [5:0]                   queue_valid,
    output logic [5:0]                   engine_idle,
    output logic [31:0]                  semaphore_zero,
    input  logic [5:0]                   counter_select,
    output logic [47:0]                  counter_value,
    input  logic [WORD_ADDRESS_BITS-1:0] debug_address,
    output logic [WB-1:0]                debug_data
);
  localparam int unsigned MAC = 4;
  localparam int unsigned VEC = 5;
  localparam int unsigned SEQ = 6;

  logic [7:0] fault_q;
  always_ff @(posedge clk) fault_q <= fault;

  assign target_digest = TARGET_DIGEST;

  // Sequencer.
  logic stopped;
  logic fetch_counting;
  /* verilator lint_off UNUSEDSIGNAL */  // of missing channels
  logic [5:0] push;
  /* verilator lint_on UNUSEDSIGNAL */
  logic [511:0] push_word;
  logic [5:0] queue_full;
  ddr_request_t [4:0] ddr_request;
  logic [4:0] ddr_granted;
  logic [6:0] take_valid;
  logic [6:0][31:0] take;
  logic [6:0] give_valid;
  logic [6:0][31:0] give;

  tw_seq seq (
      .clk, .rst, .fault(fault_q), .run, .config_write, .config_register, .config_value,
      .code_length, .finished, .trapped, .stopped, .dispatch_valid, .dispatch_engine,
      .fetch_counting, .fetch_request(ddr_request[4]), .fetch_granted(ddr_granted[4]),
      .fetch_data(mem_read_data), .semaphore_zero, .takes(take_valid[SEQ]),
      .take_mask(take[SEQ]), .give_mask(give[SEQ]), .idle(engine_idle), .queue_valid,
      .queue_full, .push, .push_word
  );

  // Queues: a head starts when its engine is idle and the semaphores it waits for are there.
  for (genvar e = 0; e < SEQ; e++) begin : gen_queue
    /* verilator lint_off UNUSEDSIGNAL */  // of missing channels
    logic [511:0] head;
    logic head_valid;
    /* verilator lint_on UNUSEDSIGNAL */
    if (e >= CHANNELS && e < MAC) begin : gen_none
      assign queue_valid[e] = 1'b0;
      assign queue_full[e] = 1'b1;
      assign head = '0;
    end else begin : gen_some
      tw_queue #(
          .LOSES_LAST_SLOT(e == MAC)
      ) queue (
          .clk, .rst, .fault(fault_q), .push(push[e]), .word(push_word), .pop(start[e]),
          .valid(queue_valid[e]), .full(queue_full[e]), .head
      );
    end
    assign head_valid = queue_valid[e] && (head[39:8] & semaphore_zero) == '0;
    assign take_valid[e] = start[e];
    assign take[e] = head[39:8];
    assign give_valid[e] = done[e];
  end
  assign give_valid[SEQ] = take_valid[SEQ];

  tw_sem sem (
      .clk, .rst, .fault(fault_q), .take_valid, .take, .give_valid, .give, .zero(semaphore_zero)
  );

  // Memories.
  sram_request_t [PORTS-1:0] sram_request;
  logic [PORTS-1:0] sram_granted;
  /* verilator lint_off UNUSEDSIGNAL */  // nobody reads at the write port and missing channels
  logic [PORTS-1:0][WB-1:0] sram_data;
  /* verilator lint_on UNUSEDSIGNAL */

  tw_sram sram (
      .clk, .rst, .fault(fault_q), .request(sram_request), .granted(sram_granted),
      .data(sram_data), .debug_address, .debug_data
  );

  tw_ddr ddr (
      .clk, .rst, .run, .request(ddr_request), .granted(ddr_granted), .mem_valid, .mem_write,
      .mem_code, .mem_address, .mem_mask, .mem_data
  );

  logic tick;
  tw_enable #(.MHZ(DMA_MHZ)) dma_enable (.clk, .rst, .run, .enable(tick));

  // Engines.
  for (genvar c = 0; c < 4; c++) begin : gen_channel
    if (c < CHANNELS) begin : gen_some
      tw_dma #(.CHANNEL(c)) dma (
          .clk, .rst, .fault(fault_q),
          .head_valid(gen_queue[c].head_valid), .head(gen_queue[c].head),
          .pop(start[c]), .done(done[c]), .done_signals(give[c]), .idle(engine_idle[c]), .tick,
          .sram_request(sram_request[5+c]), .sram_granted(sram_granted[5+c]),
          .sram_data(sram_data[5+c]), .ddr_request(ddr_request[c]),
          .ddr_granted(ddr_granted[c]), .ddr_data(mem_read_data)
      );
    end else begin : gen_none
      assign start[c] = 1'b0;
      assign done[c] = 1'b0;
      assign give[c] = '0;
      assign engine_idle[c] = 1'b1;
      assign sram_request[5+c] = '0;
      assign ddr_request[c] = '0;
    end
    assign bank_stall[c] = sram_request[5+c].valid && !sram_granted[5+c];
    assign ddr_stall[c] = ddr_request[c].valid && !ddr_granted[c];
    assign accumulator_stall[c] = 1'b0;
  end
  assign ddr_stall[5:4] = '0;

  logic [1:0] half_full;
  logic [1:0] half_freed;
  logic m_half;
  logic [$clog2(HALF_ROWS)-1:0] m_row;
  logic [N*32-1:0] m_data;

  tw_mac mac (
      .clk, .rst, .fault(fault_q),
      .head_valid(gen_queue[MAC].head_valid), .head(gen_queue[MAC].head),
      .pop(start[MAC]), .done(done[MAC]), .done_signals(give[MAC]), .idle(engine_idle[MAC]),
      .act_request(sram_request[0]), .act_granted(sram_granted[0]), .act_data(sram_data[0]),
      .wgt_request(sram_request[1]), .wgt_granted(sram_granted[1]), .wgt_data(sram_data[1]),
      .half_freed, .half_full, .m_half, .m_row, .m_data,
      .accumulator_stall(accumulator_stall[MAC])
  );
  assign bank_stall[MAC] = (sram_request[0].valid && !sram_granted[0])
      || (sram_request[1].valid && !sram_granted[1]);

  tw_vec vec (
      .clk, .rst, .fault(fault_q),
      .head_valid(gen_queue[VEC].head_valid), .head(gen_queue[VEC].head),
      .pop(start[VEC]), .done(done[VEC]), .done_signals(give[VEC]), .idle(engine_idle[VEC]),
      .a_request(sram_request[2]), .a_granted(sram_granted[2]), .a_data(sram_data[2]),
      .b_request(sram_request[3]), .b_granted(sram_granted[3]), .b_data(sram_data[3]),
      .w_request(sram_request[4]), .w_granted(sram_granted[4]),
      .half_full, .half_freed, .m_half, .m_row, .m_data,
      .accumulator_stall(accumulator_stall[VEC])
  );
  assign bank_stall[VEC] = (sram_request[2].valid && !sram_granted[2])
      || (sram_request[3].valid && !sram_granted[3])
      || (sram_request[4].valid && !sram_granted[4]);

  // What the harness looks at. The engines' own counters are not seen here: it waits as long as
  // the longest of them before it calls the machine stuck.
  assign active = sram_granted != '0 || ddr_granted != '0 || dispatch_valid || start != '0
      || done != '0 || fetch_counting;

  tw_counters counters (
      .clk, .rst, .count(run && !stopped), .engine_idle, .bank_stall, .ddr_stall,
      .accumulator_stall, .select(counter_select), .value(counter_value)
  );
endmodule
