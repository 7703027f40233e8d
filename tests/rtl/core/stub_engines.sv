// Engines without content, with the ports of the real ones, for tests of the core alone.
//
// A stub only makes accesses and lets time pass. It starts in the cycle after its pop; each port
// makes its accesses one after another, at its own pace; when all are granted it is done after as
// many further cycles as it is told to wait. Numbers are the stored fields, that is value - 1:
//   dma_load, dma_store  n1 DDR units from `ddr` on, n2 SRAM words from `sram` on, n3 cycles
//   mac_conv             out_h words at `act`, out_w words at `wgt`, block_rows cycles
//   vec_copy             n1 words at `src` (port A), n2 at `src` (port B), n3 at `dst` (write),
//                        n0 cycles
// A word read is printed (`R port data`) at the end of the cycle in which it is there.

// Counts the accesses of one port.
module stub_port (
    input  logic        clk,
    input  logic        rst,
    input  logic        load,
    input  logic [13:0] count,
    input  logic        granted,
    output logic        requesting,
    output logic        finishes,  // nothing is left after this cycle
    output logic [13:0] index
);
  logic [13:0] left_q;
  assign requesting = left_q != '0;
  assign finishes = left_q == '0 || (left_q == 14'd1 && granted);
  always_ff @(posedge clk) begin
    if (rst) left_q <= '0;
    else if (load) begin
      left_q <= count;
      index <= '0;
    end else if (granted) begin
      left_q <= left_q - 1'b1;
      index <= index + 1'b1;
    end
  end
endmodule

// States of an engine.
module stub_state (
    input  logic         clk,
    input  logic         rst,
    input  logic         head_valid,
    input  logic [511:0] head,
    input  logic [15:0]  cycles,    // of the head
    input  logic         finishes,  // all accesses are made after this cycle
    output logic         pop,
    output logic         done,
    output logic         idle,
    output logic [511:0] word
);
  logic idle_q;
  logic waiting_q;
  logic [15:0] wait_q;
  wire last = waiting_q || finishes;

  assign idle = idle_q;
  assign pop = idle_q && head_valid;
  assign done = !idle_q && last && wait_q == '0;

  always_ff @(posedge clk) begin
    if (rst) idle_q <= 1'b1;
    else if (pop) begin
      idle_q <= 1'b0;
      waiting_q <= 1'b0;
      word <= head;
      wait_q <= cycles;
    end else if (done) idle_q <= 1'b1;
    else if (!idle_q && last) begin
      waiting_q <= 1'b1;
      wait_q <= wait_q - 1'b1;
    end
  end
endmodule

// Prints what an SRAM port reads.
module stub_reader import tw_pkg::*; #(
    parameter int unsigned PORT = 0
) (
    input logic          clk,
    input logic          rst,
    input logic          read,
    input logic [WB-1:0] data
);
  logic read_q;
  always_ff @(posedge clk) begin
    read_q <= read;
    if (read_q && !rst) $display("R %0d %h", PORT, data);
  end
endmodule

/* verilator lint_off UNUSEDSIGNAL */
module tw_dma import tw_pkg::*; #(
    parameter int unsigned CHANNEL = 0
) (
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
    output sram_request_t sram_request,
    input  logic          sram_granted,
    input  logic [WB-1:0] sram_data,
    output ddr_request_t  ddr_request,
    input  logic          ddr_granted,
    input  logic [GB-1:0] ddr_data
);
  logic [511:0] word;
  dma_store_t next;  // dma_load has the same fields in the same places
  dma_store_t now;
  assign next = dma_store_t'(head);
  assign now = dma_store_t'(word);
  logic ddr_finishes, sram_finishes;
  logic [13:0] ddr_index, sram_index;
  stub_state state (
      .clk, .rst, .head_valid, .head, .cycles(16'(next.n3)),
      .finishes(ddr_finishes && sram_finishes), .pop, .done, .idle, .word
  );
  stub_port ddr_port (
      .clk, .rst, .load(pop), .count(next.n1), .granted(ddr_granted),
      .requesting(ddr_request.valid), .finishes(ddr_finishes), .index(ddr_index)
  );
  stub_port sram_port (
      .clk, .rst, .load(pop), .count(next.n2), .granted(sram_granted),
      .requesting(sram_request.valid), .finishes(sram_finishes), .index(sram_index)
  );
  stub_reader #(.PORT(5 + CHANNEL)) reader (
      .clk, .rst, .read(sram_granted && !sram_request.write), .data(sram_data)
  );
  assign done_signals = now.signal_mask;
  assign ddr_request.write = now.opcode == OP_DMA_STORE;
  assign ddr_request.burst = !now.stream;
  assign ddr_request.address = now.ddr + 40'(ddr_index) * 40'(G);
  assign ddr_request.mask = '1;
  assign ddr_request.data = {G{8'(ddr_index)}};
  assign sram_request.write = now.opcode == OP_DMA_LOAD;
  assign sram_request.address = WORD_ADDRESS_BITS'(32'(now.sram) / W) + WORD_ADDRESS_BITS'(sram_index);
  assign sram_request.mask = '1;
  assign sram_request.data = {W{8'(sram_index)}};
endmodule

module tw_mac import tw_pkg::*; (
    input  logic                         clk,
    input  logic                         rst,
    input  logic [7:0]                   fault,
    input  logic                         head_valid,
    input  logic [511:0]                 head,
    output logic                         pop,
    output logic                         done,
    output logic [31:0]                  done_signals,
    output logic                         idle,
    output sram_request_t                act_request,
    input  logic                         act_granted,
    input  logic [WB-1:0]                act_data,
    output sram_request_t                wgt_request,
    input  logic                         wgt_granted,
    input  logic [WB-1:0]                wgt_data,
    input  logic [1:0]                   half_freed,
    output logic [1:0]                   half_full,
    input  logic                         m_half,
    input  logic [$clog2(HALF_ROWS)-1:0] m_row,
    output logic [N*32-1:0]              m_data,
    output logic                         accumulator_stall
);
  logic [511:0] word;
  mac_conv_t next;
  mac_conv_t now;
  assign next = mac_conv_t'(head);
  assign now = mac_conv_t'(word);
  logic act_finishes, wgt_finishes;
  logic [13:0] act_index, wgt_index;
  logic act_valid, wgt_valid;
  stub_state state (
      .clk, .rst, .head_valid, .head, .cycles(16'(next.block_rows)),
      .finishes(act_finishes && wgt_finishes), .pop, .done, .idle, .word
  );
  stub_port act_port (
      .clk, .rst, .load(pop), .count(14'(next.out_h)), .granted(act_granted),
      .requesting(act_valid), .finishes(act_finishes), .index(act_index)
  );
  stub_port wgt_port (
      .clk, .rst, .load(pop), .count(14'(next.out_w)), .granted(wgt_granted),
      .requesting(wgt_valid), .finishes(wgt_finishes), .index(wgt_index)
  );
  always_comb begin
    act_request = '0;
    act_request.valid = act_valid;
    act_request.address = WORD_ADDRESS_BITS'(32'(now.act) / W) + WORD_ADDRESS_BITS'(act_index);
    wgt_request = '0;
    wgt_request.valid = wgt_valid;
    wgt_request.address = WORD_ADDRESS_BITS'(32'(now.wgt) / W) + WORD_ADDRESS_BITS'(wgt_index);
  end
  stub_reader #(.PORT(0)) act_reader (.clk, .rst, .read(act_granted), .data(act_data));
  stub_reader #(.PORT(1)) wgt_reader (.clk, .rst, .read(wgt_granted), .data(wgt_data));
  assign done_signals = now.signal_mask;
  assign half_full = '0;
  assign m_data = '0;
  assign accumulator_stall = !idle && !act_valid && !wgt_valid;
endmodule

module tw_vec import tw_pkg::*; (
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
  logic [511:0] word;
  vec_copy_t next;
  vec_copy_t now;
  assign next = vec_copy_t'(head);
  assign now = vec_copy_t'(word);
  logic a_finishes, b_finishes, w_finishes;
  logic [13:0] a_index, b_index, w_index;
  logic a_valid, b_valid, w_valid;
  stub_state state (
      .clk, .rst, .head_valid, .head, .cycles(next.n0),
      .finishes(a_finishes && b_finishes && w_finishes), .pop, .done, .idle, .word
  );
  stub_port a_port (
      .clk, .rst, .load(pop), .count(next.n1), .granted(a_granted), .requesting(a_valid),
      .finishes(a_finishes), .index(a_index)
  );
  stub_port b_port (
      .clk, .rst, .load(pop), .count(next.n2), .granted(b_granted), .requesting(b_valid),
      .finishes(b_finishes), .index(b_index)
  );
  stub_port w_port (
      .clk, .rst, .load(pop), .count(14'(next.n3)), .granted(w_granted), .requesting(w_valid),
      .finishes(w_finishes), .index(w_index)
  );
  always_comb begin
    a_request = '0;
    a_request.valid = a_valid;
    a_request.address = WORD_ADDRESS_BITS'(32'(now.src) / W) + WORD_ADDRESS_BITS'(a_index);
    b_request = '0;
    b_request.valid = b_valid;
    b_request.address = WORD_ADDRESS_BITS'(32'(now.src) / W) + WORD_ADDRESS_BITS'(b_index);
    w_request = '0;
    w_request.valid = w_valid;
    w_request.write = 1'b1;
    w_request.address = WORD_ADDRESS_BITS'(32'(now.dst) / W) + WORD_ADDRESS_BITS'(w_index);
    w_request.mask = W'(1) << w_index[1:0];
    w_request.data = {W{8'(w_index)}};
  end
  stub_reader #(.PORT(2)) a_reader (.clk, .rst, .read(a_granted), .data(a_data));
  stub_reader #(.PORT(3)) b_reader (.clk, .rst, .read(b_granted), .data(b_data));
  assign done_signals = now.signal_mask;
  assign half_freed = '0;
  assign m_half = 1'b0;
  assign m_row = '0;
  assign accumulator_stall = 1'b0;
endmodule
/* verilator lint_on UNUSEDSIGNAL */
